"""Scheduling when memory is given out block by block: growth, preemption, resumption.

A request is admitted when the blocks for its known tokens are free, and grows as it generates. When
a running request needs a block and none is free, the most recently admitted one is preempted: the
price of admitting more requests than could all grow to full length (PagedAttention, section 4.5).
"""

from __future__ import annotations

from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler

from .config import EngineConfig
from .kv_cache_manager import KVCacheManager


class Scheduler(BaseScheduler):
    """Serves running requests first, each with the block that it needs; then waiting requests, if
    memory is left."""

    kv: KVCacheManager

    def __init__(self, config: EngineConfig, max_model_len: int, num_blocks: int) -> None:
        config.check_holds_one_request(max_model_len, num_blocks)
        super().__init__(KVCacheManager(config, num_blocks), max_model_len, config.policy)
        self.config = config
        self.num_blocks = num_blocks
        self.num_host_blocks = config.num_host_blocks(num_blocks)

    def validate(self, request: Request) -> None:
        """Refuse a prompt that is larger than a step, and completions that could not all run."""
        self.config.check_prompt_fits_step(request.num_prompt_tokens)
        self.config.check_completions(request.sampling_params.n)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step."""
        plan = StepPlan()
        for request in self.by_seniority():
            is_running = request.status is RequestStatus.RUNNING  # not preempted for a senior one
            if is_running and self._make_room(request, plan):
                self._add_row(request, plan)
        if plan.preempted:  # memory is short: newcomers would only be preempted next
            return plan
        budget = self.config.max_num_batched_tokens - len(plan.rows)
        while self.waiting:
            request = self.waiting.peek()
            if reason := self.reason_to_wait(request, budget):
                plan.waiting_reasons[request.request_id] = reason
                break
            self.waiting.pop()
            budget -= request.num_uncomputed_tokens
            self._admit(request, plan)
        return plan

    def by_seniority(self) -> list[Request]:
        """Return running requests, seniors first; the last is the victim when memory runs out.

        Senior is the request admitted earlier, or with the lower (priority, arrival). A step serves
        seniors first, so a victim has no row in it yet.
        """
        if self.config.policy == "priority":
            return sorted(self.running, key=self.waiting.key)
        return list(self.running)

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Get the blocks for a running request's next token, preempting as long as it takes.

        Returns:
            False if the request itself was preempted.
        """
        while not self.kv.append(request, plan):
            victim = self.by_seniority()[-1]
            self.kv.preempt(victim, plan, f"no free block for {request.request_id}")
            self.running.remove(victim)
            self.waiting.add(victim)
            if victim is request:
                return False
        return True

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Return why a request and its completions cannot join a step with `budget` tokens left."""
        num_running = len(self.running) + self.completions.num_of(self.running)
        if num_running + self.completions.num_of([request]) >= self.config.max_num_seqs:
            return f"max_num_seqs={self.config.max_num_seqs}, running: {num_running}"
        num_new_tokens = request.num_uncomputed_tokens
        if num_new_tokens > budget:
            return f"tokens needed: {num_new_tokens}, left in this step: {budget}"
        if not self.kv.can_allocate(request):
            return f"no KV memory: {self.kv.describe(request)}"
        return None

    def _admit(self, request: Request, plan: StepPlan) -> None:
        """Give a new or preempted request blocks for all its tokens, and a row."""
        is_new = not request.num_preemptions
        self.kv.allocate(request, plan)
        request.become(RequestStatus.RUNNING)
        self.running.append(request)
        (plan.admitted if is_new else plan.resumed).append(request)
        self._add_row(request, plan)

    def _add_row(self, request: Request, plan: StepPlan) -> None:
        """Add a row of all known tokens without KV: a request's prompt, or its last token."""
        row = ScheduledRequest(
            request,
            start=request.num_computed_tokens,
            num_new_tokens=request.num_uncomputed_tokens,
            blocks=self.kv.blocks_of(request),
        )
        plan.rows.append(row)
        if request in self.completions.further:  # the prompt is complete: forks start from its KV
            for fork in self.completions.start(request):
                self.kv.fork(request, fork)
                fork.become(RequestStatus.RUNNING)
                self.running.append(fork)
                plan.admitted.append(fork)
                row.sampling_requests.append(fork)

    def check_invariants(self) -> None:
        """Assert that no block is lost, and that at most `max_num_seqs` requests run."""
        super().check_invariants()
        assert len(self.running) <= self.config.max_num_seqs
