"""Static batching: take a batch, pad it, run it until its *last* request is done.

This is what `model.generate` on a list of prompts does, written as a scheduler so that the waste
shows: finished rows stay in the batch as padding, and newcomers wait for all of them.

    step     0   1   2   3   4   5
    r0       P   d   d   d   d   d       P prefill, d decode
    r1       P   d   -   -   -   -       - padding: r1 is finished, its row is computed
    r2       .   .   .   .   .   .   P   . waits for the whole batch
"""

from __future__ import annotations

from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.config import EngineConfig

from .kv_cache_manager import KVCacheManager


class Scheduler(BaseScheduler):
    """Serves requests first come, first served, a whole batch at a time."""

    kv: KVCacheManager

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        super().__init__(KVCacheManager(), max_model_len)
        self.config = config

    def validate(self, request: Request) -> None:
        """Refuse a prompt that is larger than a step, and several completions of it."""
        self.config.check_prompt_fits_step(request.num_prompt_tokens)
        self.config.check_completions(request.sampling_params.n, can_share_kv=False)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step: prefill a new batch if there is none, else decode all its rows."""
        plan = self._plan_decode() if self.running else self._plan_prefill(self._form_batch())
        if self.waiting:
            head = self.waiting.peek()
            plan.waiting_reasons[head.request_id] = str(self.reason_to_wait(head))
        return plan

    def reason_to_wait(self, request: Request) -> str | None:
        """Return why a request cannot join the batch; None if it can. No request joins a batch that
        has run."""
        if self.kv.rows:
            return f"the batch of {len(self.kv.rows)} runs until its last request is done"
        num_rows = len(self.running)
        if num_rows >= self.config.max_num_seqs:
            return f"no row is left: max_num_seqs={self.config.max_num_seqs}"
        longest = max(row.num_tokens for row in [*self.running, request])
        num_tokens = (num_rows + 1) * longest
        if self.running and num_tokens > self.config.max_num_batched_tokens:
            return f"padded to {longest}, {num_rows + 1} rows are more than a step's tokens"
        return None

    def _form_batch(self) -> list[Request]:
        """Take waiting requests, first come first served, as long as they fit padded into one
        step."""
        while self.waiting and self.reason_to_wait(self.waiting.peek()) is None:
            request = self.waiting.pop()
            request.become(RequestStatus.RUNNING)
            self.running.append(request)
        return list(self.running)

    def _plan_prefill(self, batch: list[Request]) -> StepPlan:
        self.kv.allocate(batch)
        rows = [ScheduledRequest(request, 0, request.num_tokens) for request in batch]
        num_padding_tokens = sum(self.kv.width - row.num_new_tokens for row in rows)
        return StepPlan(rows=rows, admitted=batch, num_padding_tokens=num_padding_tokens)

    def _plan_decode(self) -> StepPlan:
        self.kv.append()
        rows = [
            ScheduledRequest(request, request.num_computed_tokens, 1, request.is_finished)
            for request in self.kv.rows
        ]
        return StepPlan(rows=rows, num_padding_tokens=sum(row.is_padding for row in rows))
