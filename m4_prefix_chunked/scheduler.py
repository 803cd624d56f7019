"""Scheduling with a prefix cache and with prompts computed in chunks (Sarathi-Serve, OSDI '24).

A step has a budget of tokens. Decode rows take one each, so that no running request waits for the
whole prompt of another; the rest goes to prompts in order, as large a chunk of each as fits. A
chunk that does not reach the last known token samples nothing.

    budget 8   | d d d | P P P P P |     three decode rows, five tokens of a prompt of twelve
    budget 8   | d d d | P P P P P |
    budget 8   | d d d | P P | Q Q Q |   its last two sample a token; the next prompt begins
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from m3_paged.block_manager import BlockManager
from m3_paged.completions import Completions
from m3_paged.kv_usage import check_tables, kv_stats, paged_kv_usage
from m3_paged.preemption import Preempter
from milestone_llm.core.kv import KVUsage
from milestone_llm.core.outputs import EngineCoreOutput, SampledToken
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler

from .caching_pool import CachingBlockPool
from .config import EngineConfig
from .prefix_cache import PrefixCache, PrefixHit
from .speculation import Proposer, Speculation, SpeculationCounts


class Scheduler(BaseScheduler):
    """Decode rows first, then prompts under way, then waiting requests, within a token budget."""

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        num_blocks: int,
        proposer: Proposer | None = None,
        can_guess: Callable[[StepPlan], bool] | None = None,
    ) -> None:
        config.check_holds_one_request(max_model_len, num_blocks)
        super().__init__(max_model_len, config.policy)
        self.config = config
        self.num_blocks = num_blocks
        self.num_host_blocks = config.num_host_blocks(num_blocks)
        pool = CachingBlockPool(num_blocks, self.events)
        self.kv = BlockManager(pool, config.block_size, self.events)
        self.prefix_cache = PrefixCache(self.kv, pool, config.enable_prefix_caching)
        self.preempter = Preempter(self.kv, self.num_host_blocks)
        self.completions = Completions()
        self.speculation: Speculation | None = None
        if config.speculation:
            self.speculation = Speculation(config, self.kv, proposer, can_guess)

    def validate(self, request: Request) -> None:
        """Refuse completions that could not all run, and a prompt that no chunks can carry."""
        self.config.check_completions(request.sampling_params.n)
        if not self.config.enable_chunked_prefill:
            self.config.check_prompt_fits_step(request.num_prompt_tokens)

    def schedule(self) -> StepPlan:
        """Plan the next step."""
        plan, budget = StepPlan(), self.config.max_num_batched_tokens
        self.prefix_cache.begin_step()
        if self.config.prefill_policy == "prefill_first":
            self._prefill(plan, budget)
            if not plan.rows:
                self._decode(plan, budget)
        else:
            budget = self._decode(plan, budget)
            self._prefill(plan, budget)
        if self.speculation:
            self.speculation.extend(plan, self.config.max_num_batched_tokens - plan.num_tokens)
        return plan

    def _decode(self, plan: StepPlan, budget: int) -> int:
        """A row for each running request that lacks only its last token. Returns what is left."""
        for request in self.by_seniority():
            is_running = request.status is RequestStatus.RUNNING  # not preempted for a senior one
            # Forks that start here could be victims of the next row: their prompt comes later.
            is_decode = request.num_uncomputed_tokens == 1 and request not in self.completions.forks
            if budget and is_running and is_decode and self._make_room(request, plan):
                budget -= self._add_row(request, plan, budget)
        return budget

    def _prefill(self, plan: StepPlan, budget: int) -> None:
        """The next chunk of each prompt that is under way, then new prompts."""
        for request in self.by_seniority():
            is_prompt = request.num_uncomputed_tokens > 1 or request in self.completions.forks
            if budget and is_prompt:  # it has its blocks
                budget -= self._add_row(request, plan, budget)
        while self.waiting and not plan.preempted:  # newcomers would only be preempted next
            request = self.waiting.peek()
            if reason := self.reason_to_wait(request, budget):
                plan.waiting_reasons[request.request_id] = reason
                break
            self.waiting.pop()
            num_cached = self._admit(request, plan)
            budget -= self._add_row(request, plan, budget, num_cached)

    def by_seniority(self) -> list[Request]:
        """Running requests, by admission or (priority, arrival). The last is preempted first."""
        is_by_priority = self.config.policy == "priority"
        return sorted(self.running, key=self.waiting.key) if is_by_priority else list(self.running)

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Get blocks for a running request's next token. False if the request had to go itself."""
        start, end = request.num_computed_tokens, request.num_tokens
        while not self.kv.can_append(request.request_id, start, end):
            victim = self.by_seniority()[-1]
            self.prefix_cache.make_findable(victim, victim.num_computed_tokens)
            self.preempter.preempt(victim, plan, f"no free block for {request.request_id}")
            self.prefix_cache.release(victim)
            self.running.remove(victim)
            self.waiting.add(victim)
            if victim is request:
                return False
        plan.copies += self.kv.append(request.request_id, start, end)
        return True

    def _add_row(self, request: Request, plan: StepPlan, budget: int, num_cached: int = 0) -> int:
        """A row of as many tokens as the budget allows. Returns how many it takes."""
        num_new_tokens = request.num_uncomputed_tokens
        if num_new_tokens > 1 and self.config.enable_chunked_prefill:
            longest = self.config.long_prefill_token_threshold or budget
            num_new_tokens = min(num_new_tokens, budget, longest)
        row = ScheduledRequest(
            request,
            start=request.num_computed_tokens,
            num_new_tokens=num_new_tokens,
            blocks=self.kv.block_tables[request.request_id],
            num_cached_tokens=num_cached,
        )
        plan.rows.append(row)
        self.prefix_cache.make_findable(request, row.end)
        if request in self.completions.forks and row.samples:  # they start from its KV
            for fork in self.completions.start(request):
                self.kv.fork(request.request_id, fork.request_id)
                fork.become(RequestStatus.RUNNING)
                self.running.append(fork)
                plan.admitted.append(fork)
                row.sampling_requests.append(fork)
        return num_new_tokens

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Why a request and its completions cannot join a step that has `budget` tokens left."""
        num_running = len(self.running) + self.completions.num_of(self.running)
        if num_running + self.completions.num_of([request]) >= self.config.max_num_seqs:
            return f"max_num_seqs={self.config.max_num_seqs}, running: {num_running}"
        hit = PrefixHit([], request.num_computed_tokens)  # what was swapped out comes back
        if request.status is not RequestStatus.SWAPPED:
            hit = self.prefix_cache.find(request)
        num_new_tokens = request.num_tokens - hit.num_tokens
        if budget < (1 if self.config.enable_chunked_prefill else num_new_tokens):
            return f"tokens needed: {num_new_tokens}, left in this step: {budget}"
        if not self.prefix_cache.can_allocate(request, hit):
            return f"no KV memory: {self.kv.describe(request.num_tokens)}"
        return None

    def _admit(self, request: Request, plan: StepPlan) -> int:
        """Give a new or preempted request blocks for all its tokens. Returns those found cached."""
        is_new, num_cached = not request.num_preemptions, 0
        if request.status is RequestStatus.SWAPPED:
            self.kv.allocate(request.request_id, request.num_tokens)
            self.preempter.swap_in(request, plan)
        else:
            hit = self.prefix_cache.find(request)
            plan.copies += self.prefix_cache.allocate(request, hit)
            request.num_computed_tokens = num_cached = hit.num_tokens
            if is_new:
                request.num_cached_tokens = num_cached
        request.become(RequestStatus.RUNNING)
        self.running.append(request)
        (plan.admitted if is_new else plan.resumed).append(request)
        return num_cached

    def update(
        self, plan: StepPlan, sampled: dict[str, list[SampledToken]]
    ) -> list[EngineCoreOutput]:
        """Take in the results of a step, guesses that were wrong before tokens are appended."""
        if self.speculation:
            if not plan.is_launched:
                self.mark_launched(plan)
            self.speculation.settle(plan, sampled)
        return super().update(plan, sampled)

    # -- completions of a prompt -------------------------------------------------------------

    def add(self, *requests: Request) -> None:
        """Queue requests; further completions of a prompt start when the first has computed it."""
        super().add(*requests)
        for fork in self.completions.hold_back(requests):
            self.waiting.remove(fork)

    def finish(self, request: Request, reason: str) -> None:
        """End a request in whatever state it is."""
        if self.completions.discard(request):
            request.finish(reason)
        else:
            super().finish(request, reason)

    def fail(self, plan: StepPlan) -> None:
        """End the requests of a step whose forward raised, those that wait for its prompts, too."""
        for row in plan.rows:
            for fork in self.completions.start(row.request):
                fork.finish("error")
        super().fail(plan)

    def restart(self, requests: Iterable[Request]) -> None:
        """After an exception anywhere: all wait with the tokens they have. All KV is dropped."""
        super().restart(dict.fromkeys([*requests, *self.completions.take_all()]))

    # -- KV memory ---------------------------------------------------------------------------

    def free_memory(self, request: Request) -> None:
        """Give back a request's blocks. Full ones can still be found by their content."""
        if request.request_id in self.kv.block_tables:
            if request.finish_reason == "error":
                self.prefix_cache.forget_blocks(request)
            else:
                self.prefix_cache.make_findable(request, request.num_computed_tokens)
            self.kv.free(request.request_id)
        self.prefix_cache.release(request)
        if request.request_id in self.preempter.host.block_tables:
            self.preempter.host.free(request.request_id)

    def reset_memory(self) -> None:
        """Give back all blocks and forget their content."""
        self.kv.reset()
        self.prefix_cache.reset_requests()
        self.preempter.reset()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. Refused (False) while blocks are in use."""
        if self.kv.block_tables or self.preempter.host.block_tables:
            return False
        self.kv.pool.reset()
        return True

    def num_used_units(self) -> int:
        """Blocks that requests own."""
        return self.kv.pool.num_used

    def kv_usage(self) -> KVUsage:
        """KV memory in blocks, and how many free ones can still be found."""
        num_cached = self.prefix_cache.pool.num_cached_free
        return paged_kv_usage(self.kv, self.running, self.watermark, num_cached)

    def stats(self) -> dict[str, Any]:
        """M3's figures, those of the prefix cache and of guesses."""
        counts = self.speculation.counts if self.speculation else SpeculationCounts()
        return {
            **kv_stats(self.kv, self.preempter, self.running),
            "prefix_cache": self.prefix_cache.stats(),
            **counts.stats(),
        }

    def check_invariants(self) -> None:
        """Assert that no block is lost and that tables belong to running or swapped requests."""
        self.prefix_cache.pool.check_invariants()
        check_tables(self.kv, self.preempter, self.running, self.waiting)
        assert len(self.running) <= self.config.max_num_seqs
