from __future__ import annotations

from m1_single.scheduler import Scheduler
from milestone_llm.core.request import Request


class SortedScheduler(Scheduler):
    def _form_batch(self) -> list[Request]:
        oldest = self.waiting.peek()

        def distance(request: Request) -> int:
            prompts = abs(request.num_prompt_tokens - oldest.num_prompt_tokens)
            outputs = abs(request.sampling_params.max_tokens - oldest.sampling_params.max_tokens)
            return prompts + outputs

        # Stable: the oldest, at distance 0, is among them, and of equals those that came first.
        nearest_first = sorted(self.waiting, key=distance)
        others = nearest_first[self.config.max_num_seqs :]
        for request in others:
            self.waiting.remove(request)
        batch = super()._form_batch()
        for request in others:
            self.waiting.add(request)  # back to its place
        return batch
