"""Planning a step while the one before still runs, so that the GPU never waits for Python.

    host   | plan n+1 | launch n+1 | tokens of n: settle n | expect n+1 | plan n+2 | ...
    device |    step n ............|  step n+1 ...................................

A launched step is *expected*: its rows count as computed, and each row that samples gets a
placeholder for the token that will come. The next plan is made with that. When the tokens arrive,
the step is *settled*: placeholders become tokens, and requests finish. A request that turns out to
have finished (EOS, a stop string) may have a row in the step that runs by then; what that row
computes is dropped. One that reaches its length is known beforehand and gets no such row.
"""

from __future__ import annotations

from m3_paged.scheduler import PagedStepPlan
from m4_prefix_chunked.scheduler import Scheduler as ChunkedScheduler
from milestone_llm.engine.plan import ScheduledRequest, StepPlan
from milestone_llm.engine.request import Request, RequestOutput, RequestStatus, SampledToken

PLACEHOLDER = -1
"""Stands last in `token_ids` for a token that is being sampled."""


class Scheduler(ChunkedScheduler):
    """M4's schedule, one step ahead of the tokens. Used without `expect`, it is M4's."""

    def expect(self, plan: StepPlan, sampling: list[bool]) -> None:
        """Count a launched step as computed.

        Args:
            sampling: for each row, whether it samples.
        """
        for row, samples in zip(plan.rows, sampling, strict=True):
            if not row.request.is_finished:
                row.request.num_computed_tokens = row.end
                if samples:
                    row.request.token_ids.append(PLACEHOLDER)

    def settle(
        self, plan: StepPlan, sampling: list[bool], sampled: dict[str, SampledToken]
    ) -> list[RequestOutput]:
        """Take in the tokens of an expected step: what `update` is to a step just computed.

        Returns:
            Outputs of the requests that got a token.
        """
        changed: list[Request] = []
        finished: list[Request] = []
        for row, samples in zip(plan.rows, sampling, strict=True):
            request = row.request
            if request.is_finished:  # by the step before, or aborted: nobody wants this row
                row.is_padding = True
                plan.num_padding_tokens += row.num_new_tokens
            elif samples:
                status = request.status
                drop_placeholder(request)
                request.append_token(sampled[request.request_id], self.max_model_len)
                changed.append(request)
                if request.is_finished:
                    finished.append(request)
                    if status is not RequestStatus.RUNNING:  # it was preempted meanwhile
                        self.waiting.remove(request)
        self._end(finished)
        return [RequestOutput.from_request(request) for request in changed]

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is, also while its next token is being sampled."""
        drop_placeholder(request)
        super().abort(request)

    def fail(self, plan: StepPlan) -> list[RequestOutput]:
        """End the requests of a step that raised. What was cached meanwhile cannot be trusted."""
        for row in plan.rows:
            drop_placeholder(row.request)
        for request in self.waiting:  # preempted while the step ran: recomputed from known tokens
            drop_placeholder(request)
        self.kv.pool.forget_all()
        self.kv.pending.clear()
        return super().fail(plan)

    def is_decoding(self, request: Request) -> bool:
        """As before; but the token on its way may be the last one asked for."""
        return (
            super().is_decoding(request)
            and request.num_output_tokens < request.sampling_params.max_tokens
            and request.num_tokens < self.max_model_len
        )

    def _cache_row(self, row: ScheduledRequest) -> None:
        """As before; but a block is found by its tokens, so all of them must be known.

        The token before `start` may have been a placeholder when its row was planned.
        """
        end = min(row.end, num_known_tokens(row.request))
        self.kv.cache_full_blocks(row.request, max(0, row.start - 1), end)

    def _preempt(self, victim: Request, plan: PagedStepPlan, reason: str) -> None:
        self._cache_computed(victim)
        super()._preempt(victim, plan, reason)

    def _release(self, finished: list[Request]) -> None:
        for request in finished:
            if request.finish_reason != "error" and request.request_id in self.kv.owners:
                self._cache_computed(request)
        super()._release(finished)

    def _cache_computed(self, request: Request) -> None:
        """Before its blocks go, make findable what the last rows completed."""
        end = min(request.num_computed_tokens, num_known_tokens(request))
        self.kv.cache_full_blocks(request, 0, end)


def drop_placeholder(request: Request) -> None:
    """Forget that a token was expected."""
    if request.token_ids[-1] == PLACEHOLDER:
        request.token_ids.pop()


def num_known_tokens(request: Request) -> int:
    """Tokens of a request, without one that is still being sampled."""
    return request.num_tokens - (request.token_ids[-1] == PLACEHOLDER)
