"""Static batching: take a batch, pad it, run it until its *last* request is done.

This is what `model.generate` on a list of prompts does, written as a scheduler so that the waste
shows: finished rows stay in the batch as padding, and newcomers wait for all of them. Later
milestones replace `schedule`; `update` is the same for all.
"""

from __future__ import annotations

from collections import deque

from milestone_llm.engine.config import EngineConfig
from milestone_llm.engine.plan import ScheduledRequest, StepPlan
from milestone_llm.engine.request import Request, RequestOutput, RequestStatus, SampledToken
from milestone_llm.trace.tracer import KVEvent, KVUsage


class Scheduler:
    """Decides what each step computes. Knows requests and token counts, no tensors."""

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        self.config = config
        self.max_model_len = max_model_len
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.ended: list[Request] = []  # finished since the engine last asked
        self.batch: list[Request] = []  # rows of the static batch, finished ones included
        self.batch_width = 0  # tokens per row in the padded KV cache
        self.kv_watermark = 0

    # -- requests come and go ----------------------------------------------------------------

    def validate(self, request: Request) -> None:
        """Refuse a request that no step could ever compute.

        Raises:
            ValueError: the prompt is larger than a whole step.
        """
        if request.num_prompt_tokens > self.config.max_num_batched_tokens:
            raise ValueError(
                f"the prompt has {request.num_prompt_tokens} tokens, but a step computes at most "
                f"max_num_batched_tokens={self.config.max_num_batched_tokens}"
            )

    def add(self, request: Request) -> None:
        """Put a new request at the end of the queue."""
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is. In a running batch it becomes padding."""
        if request.status in (RequestStatus.WAITING, RequestStatus.SWAPPED):
            self.waiting.remove(request)
        request.finish("abort")
        self._end([request])

    def has_unfinished_requests(self) -> bool:
        """Whether a further step has something to compute."""
        return bool(self.waiting or self.running)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step: prefill a new batch if there is none, else decode all its rows."""
        if self.batch:
            return self._plan_decode()
        return self._plan_prefill(self._form_batch())

    def _form_batch(self) -> list[Request]:
        """Take waiting requests, first come first served, while padded they fit in one step."""
        longest = 0
        while self.waiting and len(self.batch) < self.config.max_num_seqs:
            longest = max(longest, self.waiting[0].num_prompt_tokens)
            if (len(self.batch) + 1) * longest > self.config.max_num_batched_tokens:
                break
            request = self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.batch.append(request)
        self.running = list(self.batch)
        return self.batch

    def _plan_prefill(self, batch: list[Request]) -> StepPlan:
        rows = [ScheduledRequest(request, 0, request.num_prompt_tokens) for request in batch]
        self._widen(max(row.num_new_tokens for row in rows))
        num_padding_tokens = sum(self.batch_width - row.num_new_tokens for row in rows)
        return StepPlan(rows=rows, admitted=list(batch), num_padding_tokens=num_padding_tokens)

    def _plan_decode(self) -> StepPlan:
        self._widen(self.batch_width + 1)
        rows = [
            ScheduledRequest(request, request.num_computed_tokens, 1, request.is_finished)
            for request in self.batch
        ]
        return StepPlan(rows=rows, num_padding_tokens=sum(row.is_padding for row in rows))

    def _widen(self, width: int) -> None:
        """Every row of the padded KV cache becomes `width` tokens wide."""
        self.batch_width = width
        self.kv_watermark = max(self.kv_watermark, len(self.batch) * width)

    def update(self, plan: StepPlan, sampled: dict[str, SampledToken]) -> list[RequestOutput]:
        """Take in what a step computed: advance its requests, append tokens, finish some.

        Args:
            plan: the executed plan.
            sampled: one token for each row that `samples`, by request id.

        Returns:
            Outputs of the requests that got a token.
        """
        changed: dict[str, Request] = {}
        finished = []
        for row in plan.rows:
            if row.request.is_finished:  # padding
                continue
            samples = row.sampling_requests  # asked before a token is appended
            row.request.num_computed_tokens = row.end
            for request in samples:
                request.append_token(sampled[request.request_id], self.max_model_len)
                leader = request.leader or request
                changed[leader.request_id] = leader
                if request.is_finished:
                    finished.append(request)
        self._end(finished)
        return [RequestOutput.from_request(request) for request in changed.values()]

    def fail(self, plan: StepPlan) -> list[RequestOutput]:
        """End the requests of a step whose forward raised, free what they held."""
        failed = [
            request
            for row in plan.rows
            for request in (row.request, *row.request.forks)
            if not request.is_finished
        ]
        for request in failed:
            request.finish("error")
        self._end(failed)
        leaders = {(request.leader or request).request_id: request for request in failed}
        return [RequestOutput.from_request(request) for request in leaders.values()]

    def _end(self, finished: list[Request]) -> None:
        self.ended += finished
        self._release(finished)

    def take_ended(self) -> list[Request]:
        """Requests that finished since the last call, aborted ones included."""
        ended, self.ended = self.ended, []
        return ended

    def _release(self, finished: list[Request]) -> None:
        """Give back what finished requests hold: here nothing, until the last row is done."""
        self.running = [request for request in self.running if not request.is_finished]
        if not self.running:
            self.batch = []
            self.batch_width = 0

    # -- what the tracer asks ----------------------------------------------------------------

    def drain_events(self) -> list[KVEvent]:
        """KV events since the last call."""
        return []

    def kv_usage(self) -> KVUsage:
        """KV memory in tokens: every row of the batch is as wide as the widest."""
        reserved = len(self.batch) * self.batch_width
        return KVUsage(
            unit="token",
            total=reserved,  # Hugging Face's cache grows as needed: it has no pool
            used=reserved,
            watermark=self.kv_watermark,
            reserved_tokens=reserved,
            stored_tokens=sum(request.num_computed_tokens for request in self.running),
        )

    def check_invariants(self) -> None:
        """Assert that the batch is empty or still has an unfinished row."""
        unfinished = [request for request in self.batch if not request.is_finished]
        assert self.running == unfinished, "running rows are the batch's unfinished ones"
        assert not self.batch or unfinished, "a static batch outlived its last request"
