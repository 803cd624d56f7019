"""Iteration-level scheduling (Orca, OSDI '22, section 3, S1): requests are chosen at every step.

A step first gives each running request its next token, then admits waiting ones while regions, rows
and the token budget last. A request that finishes leaves in the same step; the next step gives its
place to another request. Prefill and decode rows share a step.
"""

from __future__ import annotations

from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler

from .config import EngineConfig
from .kv_cache_manager import KVCacheManager


class Scheduler(BaseScheduler):
    """Serves running requests first, then waiting ones in the order of the queue."""

    kv: KVCacheManager

    def __init__(self, config: EngineConfig, max_model_len: int) -> None:
        kv = KVCacheManager(config.max_num_seqs, max_model_len)
        super().__init__(kv, max_model_len, config.policy)
        self.config = config

    def validate(self, request: Request) -> None:
        """Refuse a prompt that is larger than a step, and several completions of it."""
        self.config.check_prompt_fits_step(request.num_prompt_tokens)
        self.config.check_completions(request.sampling_params.n, can_share_kv=False)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plan the next step."""
        plan = StepPlan()
        for request in self.running:
            plan.rows.append(self._row(request))
        budget = self.config.max_num_batched_tokens - len(plan.rows)
        while self.waiting:
            request = self.waiting.peek()
            if reason := self.reason_to_wait(request, budget):
                plan.waiting_reasons[request.request_id] = reason
                break  # the first that does not fit stops it: nobody overtakes
            self.waiting.pop()
            budget -= request.num_uncomputed_tokens
            self._admit(request, plan)
        return plan

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Return why a request cannot join a step with `budget` tokens left; None if it can."""
        if len(self.running) >= self.config.max_num_seqs:
            return f"no row is left: max_num_seqs={self.config.max_num_seqs}"
        num_new_tokens = request.num_uncomputed_tokens
        # A request computed again after an interruption may be longer than a step: it goes alone.
        if num_new_tokens > budget and self.running:
            return f"tokens needed: {num_new_tokens}, left in this step: {budget}"
        if not self.kv.can_allocate(request):
            return f"no KV memory: {self.kv.describe(request)}"
        return None

    def _admit(self, request: Request, plan: StepPlan) -> None:
        """Give a waiting request a region for its KV, and its first row."""
        self.kv.allocate(request)
        request.become(RequestStatus.RUNNING)
        self.running.append(request)
        plan.admitted.append(request)
        plan.rows.append(self._row(request))

    def _row(self, request: Request) -> ScheduledRequest:
        """Return a row of all known tokens without KV: a request's prompt, or its last token."""
        return ScheduledRequest(
            request,
            start=request.num_computed_tokens,
            num_new_tokens=request.num_uncomputed_tokens,
            blocks=self.kv.blocks_of(request),
        )
