"""Static batching: take a batch, pad it, run it until its *last* request is done.

This is what `model.generate` on a list of prompts does, written as a scheduler so that the waste
shows: finished rows stay in the batch as padding, and newcomers wait for all of them.

    step     0   1   2   3   4   5
    r0       P   d   d   d   d   d       P prefill, d decode
    r1       P   d   -   -   -   -       - padding: r1 is finished, its row is computed
    r2       .   .   .   .   .   .   P   . waits for the whole batch
"""

from __future__ import annotations

from milestone_llm.core.kv import KVUsage
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.config import EngineConfig


class Scheduler(BaseScheduler):
    """First come, first served, a whole batch at a time."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        super().__init__(max_model_len)
        self.config = config
        self.batch: list[Request] = []
        """Rows of the static batch, finished ones included."""
        self.batch_width = 0
        """Tokens per row in the padded KV cache."""

    def validate(self, request: Request) -> None:
        """Refuse a prompt that is larger than a step, and several completions of it."""
        self.config.check_prompt_fits_step(request.num_prompt_tokens)
        self.config.check_completions(request.sampling_params.n, can_share_kv=False)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step: prefill a new batch if there is none, else decode all its rows."""
        plan = self._plan_decode() if self.batch else self._plan_prefill(self._form_batch())
        if self.waiting:
            head = self.waiting.peek()
            plan.waiting_reasons[head.request_id] = str(self.reason_to_wait(head))
        return plan

    def reason_to_wait(self, request: Request) -> str | None:
        """Why a request cannot join the batch; None if it can, which is so before it has run."""
        num_rows = len(self.batch)
        if self.batch_width:
            return f"the batch of {num_rows} runs until its last request is done"
        if num_rows >= self.config.max_num_seqs:
            return f"no row is left: max_num_seqs={self.config.max_num_seqs}"
        longest = max(row.num_tokens for row in [*self.batch, request])
        num_tokens = (num_rows + 1) * longest
        if self.batch and num_tokens > self.config.max_num_batched_tokens:
            return f"padded to {longest}, {num_rows + 1} rows are more than a step's tokens"
        return None

    def _form_batch(self) -> list[Request]:
        """Take waiting requests, first come first served, while padded they fit in one step."""
        while self.waiting and self.reason_to_wait(self.waiting.peek()) is None:
            request = self.waiting.pop()
            request.become(RequestStatus.RUNNING)
            self.batch.append(request)
        self.running = list(self.batch)
        return self.batch

    def _plan_prefill(self, batch: list[Request]) -> StepPlan:
        rows = [ScheduledRequest(request, 0, request.num_tokens) for request in batch]
        self.batch_width = max(row.num_new_tokens for row in rows)
        num_padding_tokens = sum(self.batch_width - row.num_new_tokens for row in rows)
        return StepPlan(rows=rows, admitted=list(batch), num_padding_tokens=num_padding_tokens)

    def _plan_decode(self) -> StepPlan:
        self.batch_width += 1
        rows = [
            ScheduledRequest(request, request.num_computed_tokens, 1, request.is_finished)
            for request in self.batch
        ]
        return StepPlan(rows=rows, num_padding_tokens=sum(row.is_padding for row in rows))

    # -- KV memory ---------------------------------------------------------------------------

    def free_memory(self, request: Request) -> None:
        """Nothing is given back until the last row is done; then all of it."""
        if not self.running:
            self.reset_memory()

    def reset_memory(self) -> None:
        """Drop the batch."""
        self.batch = []
        self.batch_width = 0

    def num_used_units(self) -> int:
        """Tokens that the padded batch has room for: every row is as wide as the widest."""
        return len(self.batch) * self.batch_width

    def kv_usage(self) -> KVUsage:
        """KV memory in tokens."""
        reserved = self.num_used_units()
        return KVUsage(
            unit="token",
            total=reserved,  # Hugging Face's cache grows as needed: it has no pool
            used=reserved,
            watermark=self.watermark,
            reserved_tokens=reserved,
            stored_tokens=sum(request.num_computed_tokens for request in self.running),
        )

    def check_invariants(self) -> None:
        """Assert that the batch is empty or still has an unfinished row."""
        unfinished = [request for request in self.batch if not request.is_finished]
        assert self.running == unfinished, "running rows are the batch's unfinished ones"
        assert not self.batch or unfinished, "a static batch outlived its last request"
