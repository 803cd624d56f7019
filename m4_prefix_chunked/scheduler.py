"""Scheduling with a prefix cache and with prompts computed in chunks (Sarathi-Serve, OSDI '24).

A step has a budget of tokens. Decode rows take one each, so that nobody's next token waits for
somebody's prompt; what is left goes to prompts in order, as large a chunk of each as fits. A chunk
that does not reach the last known token samples nothing.
"""

from __future__ import annotations

from dataclasses import replace

from m3_paged.scheduler import PagedStepPlan
from m3_paged.scheduler import Scheduler as PagedScheduler
from milestone_llm.engine.plan import ScheduledRequest, StepPlan
from milestone_llm.engine.request import Request, RequestOutput, RequestStatus
from milestone_llm.trace.tracer import KVEvent, KVUsage

from .config import EngineConfig
from .prefix_cache import PrefixCache


class Scheduler(PagedScheduler):
    """Replaces how the token budget is divided, and what an admitted request must compute."""

    config: EngineConfig
    kv: PrefixCache

    def build_kv_manager(self) -> PrefixCache:
        """Block tables over a pool that remembers content."""
        return PrefixCache(
            self.num_blocks, self.config.block_size, self.config.enable_prefix_caching
        )

    def validate(self, request: Request) -> None:
        """With chunked prefill a prompt may be longer than a step."""
        if self.config.enable_chunked_prefill:
            self.check_n(request)
        else:
            super().validate(request)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> PagedStepPlan:
        """Plan the next step: decode rows, chunks already begun, then waiting requests."""
        plan, budget = PagedStepPlan(), self.config.max_num_batched_tokens
        self.kv.begin_step()
        if self.config.prefill_policy == "prefill_first":
            self._prefill(plan, budget)
            if not plan.rows:
                self._decode(plan, budget)
        else:
            budget = self._decode(plan, budget)
            self._prefill(plan, budget)
        return plan

    def _decode(self, plan: PagedStepPlan, budget: int) -> int:
        """A row for each running request that lacks only its last token. Returns what is left."""
        for request in self.by_seniority():
            is_running = request.status is RequestStatus.RUNNING  # not preempted for a senior one
            if not budget or not is_running or not self.is_decoding(request):
                continue
            if self._make_room(request, plan):
                budget -= self._add_row(plan, self._row(request), budget)
        return budget

    def _prefill(self, plan: PagedStepPlan, budget: int) -> None:
        """The next chunk of each prompt that is under way, then new prompts."""
        for request in self.by_seniority():
            if budget and self.is_prefilling(request):  # its blocks were reserved at admission
                budget -= self._add_row(plan, self._row(request), budget)
        if not plan.preempted:
            self._admit(plan, budget)

    def is_prefilling(self, request: Request) -> bool:
        """Whether more than the last known token has yet to be computed."""
        return request.num_tokens - request.num_computed_tokens > 1

    def is_decoding(self, request: Request) -> bool:
        """Whether just the last known token has yet to be computed."""
        return request.num_tokens - request.num_computed_tokens == 1

    def _add_row(self, plan: StepPlan, row: ScheduledRequest, budget: int) -> int:
        """Cut a row to the budget; what it completes can be found from now on."""
        if self.config.enable_chunked_prefill:
            row.num_new_tokens = min(row.num_new_tokens, self.config.max_row_tokens(budget))
        self._cache_row(row)
        return super()._add_row(plan, row, budget)

    def _cache_row(self, row: ScheduledRequest) -> None:
        """Make the blocks findable that a row completes."""
        self.kv.cache_full_blocks(row.request, row.start, row.end)

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Why a request cannot join a step, its cached prefix considered; None if it can."""
        if reason := self.no_seat_reason(request):
            return reason
        is_swapped = request.status is RequestStatus.SWAPPED
        num_cached = request.num_computed_tokens if is_swapped else self.kv.find_prefix(request)[1]
        num_new_tokens = request.num_tokens - num_cached
        if budget < (1 if self.config.enable_chunked_prefill else num_new_tokens):
            return f"it needs {num_new_tokens} tokens, the step has {budget} left"
        if is_swapped:
            has_room = self.kv.can_allocate(request.num_tokens)
        else:
            has_room = self.kv.can_allocate_with_prefix(request)
        return None if has_room else f"no KV memory: {self.kv.describe(request.num_tokens)}"

    def _allocate(self, request: Request, plan: StepPlan) -> None:
        """Reserve blocks for all known tokens; those found in the cache are computed already."""
        if request.status is RequestStatus.SWAPPED:
            return super()._allocate(request, plan)
        assert isinstance(plan, PagedStepPlan)
        num_cached, copies = self.kv.allocate_with_prefix(request)
        plan.copies += copies
        request.num_computed_tokens = num_cached
        if not request.metrics.num_preemptions:
            request.metrics.num_cached_tokens = num_cached

    def _start(self, request: Request, plan: StepPlan) -> ScheduledRequest:
        """Admit or resume; the row says how much the cache saved."""
        is_swapped = request.status is RequestStatus.SWAPPED
        row = super()._start(request, plan)
        row.num_cached_tokens = 0 if is_swapped else row.start
        return row

    def fail(self, plan: StepPlan) -> list[RequestOutput]:
        """As before; and blocks that the step was to fill hold nothing worth finding."""
        self.kv.forget_pending()
        return super().fail(plan)

    def _end(self, finished: list[Request]) -> None:
        super()._end(finished)
        for request in finished:
            self.kv.forget_request(request.request_id)

    # -- what the tracer asks ----------------------------------------------------------------

    def drain_events(self) -> list[KVEvent]:
        """As before, with evictions."""
        evictions = [KVEvent("evict", None, [block]) for block in self.kv.take_evictions()]
        return evictions + super().drain_events()

    def kv_usage(self) -> KVUsage:
        """As before, with the free blocks that can still be found."""
        return replace(super().kv_usage(), cached=self.kv.pool.num_cached_free)
