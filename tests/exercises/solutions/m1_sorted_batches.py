from __future__ import annotations

from collections import deque

from m1_single.scheduler import Scheduler
from milestone_llm.engine.request import Request


class SortedScheduler(Scheduler):
    def _form_batch(self) -> list[Request]:
        oldest = self.waiting[0]

        def distance(request: Request) -> int:
            prompts = abs(request.num_prompt_tokens - oldest.num_prompt_tokens)
            outputs = abs(request.sampling_params.max_tokens - oldest.sampling_params.max_tokens)
            return prompts + outputs

        # Stable: the oldest, at distance 0, stays first, and equals stay in order of arrival.
        self.waiting = deque(sorted(self.waiting, key=distance))
        batch = super()._form_batch()
        self.waiting = deque(sorted(self.waiting, key=lambda request: request.arrival))
        return batch
