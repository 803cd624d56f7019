"""Scheduling with a prefix cache and with prompts computed in chunks (Sarathi-Serve, OSDI '24).

A step has a budget of tokens. Decode rows take one each, so that no running request waits for the
whole prompt of another; the rest goes to prompts in order, as large a chunk of each as fits. A
chunk that does not reach the last known token samples nothing.

    budget 8   | d d d | P P P P P |     three decode rows, five tokens of a prompt of twelve
    budget 8   | d d d | P P P P P |
    budget 8   | d d d | P P | Q Q Q |   its last two sample a token; the next prompt begins
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from milestone_llm.core.outputs import EngineCoreOutput, SampledToken
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler

from .config import EngineConfig
from .kv_cache_manager import KVCacheManager
from .speculation import Proposer, Speculation, SpeculationCounts


class Scheduler(BaseScheduler):
    """Plans decode rows first, then prompts under way, then waiting requests, within a token
    budget."""

    kv: KVCacheManager

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        num_blocks: int,
        proposer: Proposer | None = None,
        can_guess: Callable[[StepPlan], bool] | None = None,
    ) -> None:
        config.check_holds_one_request(max_model_len, num_blocks)
        super().__init__(KVCacheManager(config, num_blocks), max_model_len, config.policy)
        self.config = config
        self.num_blocks = num_blocks
        self.num_host_blocks = config.num_host_blocks(num_blocks)
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
        self.kv.begin_step()
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
        """Add a row for each running request that lacks only its last token. Returns the budget
        left."""
        for request in self.by_seniority():
            is_running = request.status is RequestStatus.RUNNING  # not preempted for a senior one
            # Forks that start here could be victims of the next row: their prompt comes later.
            is_decode = (
                request.num_uncomputed_tokens == 1 and request not in self.completions.further
            )
            if budget and is_running and is_decode and self._make_room(request, plan):
                budget -= self._add_row(request, plan, budget)
        return budget

    def _prefill(self, plan: StepPlan, budget: int) -> None:
        """Add the next chunk of each prompt that is under way, then new prompts."""
        prompts = self.by_seniority() if len(plan.rows) < len(self.running) else []  # all decode
        for request in prompts:
            is_prompt = request.num_uncomputed_tokens > 1 or request in self.completions.further
            if budget and is_prompt:  # the request already has its blocks
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
        """Return running requests by admission or (priority, arrival). The last is preempted
        first."""
        is_by_priority = self.config.policy == "priority"
        return sorted(self.running, key=self.waiting.key) if is_by_priority else list(self.running)

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Get blocks for a running request's next token. Returns False if the request itself was
        preempted."""
        while not self.kv.append(request, plan):
            victim = self.by_seniority()[-1]
            self.kv.preempt(victim, plan, f"no free block for {request.request_id}")
            self.running.remove(victim)
            self.waiting.add(victim)
            if victim is request:
                return False
        return True

    def _add_row(self, request: Request, plan: StepPlan, budget: int, num_cached: int = 0) -> int:
        """Add a row of as many tokens as the budget allows. Returns how many tokens it takes."""
        num_new_tokens = request.num_uncomputed_tokens
        if num_new_tokens > 1 and self.config.enable_chunked_prefill:
            longest = self.config.long_prefill_token_threshold or budget
            num_new_tokens = min(num_new_tokens, budget, longest)
        row = ScheduledRequest(
            request,
            start=request.num_computed_tokens,
            num_new_tokens=num_new_tokens,
            blocks=self.kv.blocks_of(request),
            num_cached_tokens=num_cached,
        )
        plan.rows.append(row)
        self.kv.cache(request, row.end)
        if request in self.completions.further and row.samples:  # its prompt is complete
            for fork in self.completions.start(request):
                self.kv.fork(request, fork)
                fork.become(RequestStatus.RUNNING)
                self.running.append(fork)
                plan.admitted.append(fork)
                row.sampling_requests.append(fork)
        return num_new_tokens

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Return why a request and its completions cannot join a step with `budget` tokens left."""
        num_running = len(self.running) + self.completions.num_of(self.running)
        if num_running + self.completions.num_of([request]) >= self.config.max_num_seqs:
            return f"max_num_seqs={self.config.max_num_seqs}, running: {num_running}"
        num_new_tokens = request.num_tokens - self.kv.find(request)
        if budget < (1 if self.config.enable_chunked_prefill else num_new_tokens):
            return f"tokens needed: {num_new_tokens}, left in this step: {budget}"
        if not self.kv.can_allocate(request):
            return f"no KV memory: {self.kv.describe(request)}"
        return None

    def _admit(self, request: Request, plan: StepPlan) -> int:
        """Give a new or preempted request blocks for all its tokens. Returns how many of them were
        cached."""
        is_new = not request.num_preemptions
        num_cached = self.kv.allocate(request, plan)
        request.become(RequestStatus.RUNNING)
        self.running.append(request)
        (plan.admitted if is_new else plan.resumed).append(request)
        return num_cached

    def update(
        self, plan: StepPlan, sampled: dict[str, list[SampledToken]]
    ) -> list[EngineCoreOutput]:
        """Take in the results of a step. Rejected draft tokens leave before tokens are appended."""
        if self.speculation:
            if not plan.is_launched:
                self.mark_launched(plan)
            self.speculation.settle(plan, sampled)
        return super().update(plan, sampled)

    def stats(self) -> dict[str, Any]:
        """Return M3's figures, and those of the prefix cache and of speculation."""
        counts = self.speculation.counts if self.speculation else SpeculationCounts()
        return {**super().stats(), **counts.stats()}

    def check_invariants(self) -> None:
        """Assert that no block is lost, and that at most `max_num_seqs` requests run."""
        super().check_invariants()
        assert len(self.running) <= self.config.max_num_seqs
