"""Scheduling when memory is given out block by block: growth, preemption, resumption.

A request is admitted when the blocks for its known tokens are free, and grows as it generates. When
a running request needs a block and none is free, the most recently admitted one is preempted: the
price of admitting more requests than could all grow to full length (PagedAttention, section 4.5).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from milestone_llm.core.kv import KVUsage
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.scheduler import BaseScheduler

from .block_manager import BlockManager
from .block_pool import BlockPool
from .completions import Completions
from .config import EngineConfig
from .kv_usage import check_tables, kv_stats, paged_kv_usage
from .preemption import Preempter


class Scheduler(BaseScheduler):
    """Running requests first, each with the block it needs; then waiting ones if memory is left."""

    def __init__(self, config: EngineConfig, max_model_len: int, num_blocks: int) -> None:
        config.check_holds_one_request(max_model_len, num_blocks)
        super().__init__(max_model_len, config.policy)
        self.config = config
        self.num_blocks = num_blocks
        self.num_host_blocks = config.num_host_blocks(num_blocks)
        self.kv = BlockManager(BlockPool(num_blocks), config.block_size, self.events)
        self.preempter = Preempter(self.kv, self.num_host_blocks)
        self.completions = Completions()

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
        """Running requests; the last is the victim when memory runs out.

        Senior is the request admitted earlier, or with the lower (priority, arrival). A step serves
        seniors first, so a victim has no row in it yet.
        """
        if self.config.policy == "priority":
            return sorted(self.running, key=self.waiting.key)
        return list(self.running)

    def _make_room(self, request: Request, plan: StepPlan) -> bool:
        """Get the blocks for a running request's next token, preempting as long as it takes.

        Returns:
            False if the request had to go itself.
        """
        start, end = request.num_computed_tokens, request.num_tokens
        while not self.kv.can_append(request.request_id, start, end):
            victim = self.by_seniority()[-1]
            self.preempter.preempt(victim, plan, f"no free block for {request.request_id}")
            self.running.remove(victim)
            self.waiting.add(victim)
            if victim is request:
                return False
        plan.copies += self.kv.append(request.request_id, start, end)
        return True

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Why a request and its completions cannot join a step that has `budget` tokens left."""
        num_running = len(self.running) + self.completions.num_of(self.running)
        if num_running + self.completions.num_of([request]) >= self.config.max_num_seqs:
            return f"max_num_seqs={self.config.max_num_seqs}, running: {num_running}"
        num_new_tokens = request.num_uncomputed_tokens
        if num_new_tokens > budget:
            return f"tokens needed: {num_new_tokens}, left in this step: {budget}"
        if not self.kv.can_allocate(request.num_tokens):
            return f"no KV memory: {self.kv.describe(request.num_tokens)}"
        return None

    def _admit(self, request: Request, plan: StepPlan) -> None:
        """Give a new or preempted request blocks for all its tokens, and a row."""
        is_new = not request.num_preemptions
        self.kv.allocate(request.request_id, request.num_tokens)
        if request.status is RequestStatus.SWAPPED:
            self.preempter.swap_in(request, plan)
        request.become(RequestStatus.RUNNING)
        self.running.append(request)
        if is_new:
            plan.admitted.append(request)
        else:
            plan.resumed.append(request)
        self._add_row(request, plan)

    def _add_row(self, request: Request, plan: StepPlan) -> None:
        """All known tokens of a request whose KV is not there yet: its prompt, or the last one."""
        row = ScheduledRequest(
            request,
            start=request.num_computed_tokens,
            num_new_tokens=request.num_uncomputed_tokens,
            blocks=self.kv.block_tables[request.request_id],
        )
        plan.rows.append(row)
        # The prompt is complete with this step: its further completions start from its KV.
        for fork in self.completions.start(request):
            self.kv.fork(request.request_id, fork.request_id)
            fork.become(RequestStatus.RUNNING)
            self.running.append(fork)
            plan.admitted.append(fork)
            row.sampling_requests.append(fork)

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

    def restart(self, requests: Iterable[Request]) -> None:
        """After an exception anywhere: all wait with the tokens they have. All KV is dropped."""
        super().restart(dict.fromkeys([*requests, *self.completions.take_all()]))

    # -- KV memory ---------------------------------------------------------------------------

    def free_memory(self, request: Request) -> None:
        """Give back a request's blocks, on the device or in host memory."""
        if request.request_id in self.kv.block_tables:
            self.kv.free(request.request_id)
        if request.request_id in self.preempter.host.block_tables:
            self.preempter.host.free(request.request_id)

    def reset_memory(self) -> None:
        """Give back all blocks."""
        self.kv.reset()
        self.preempter.reset()

    def num_used_units(self) -> int:
        """Blocks that requests own."""
        return self.kv.pool.num_used

    def kv_usage(self) -> KVUsage:
        """KV memory in blocks. Waste is at most one partly filled block a request."""
        return paged_kv_usage(self.kv, self.running, self.watermark)

    def stats(self) -> dict[str, Any]:
        """Preemptions, copies, and places that are reserved but empty."""
        return kv_stats(self.kv, self.preempter, self.running)

    def check_invariants(self) -> None:
        """Assert that no block is lost and that tables belong to running or swapped requests."""
        check_tables(self.kv, self.preempter, self.running, self.waiting)
        assert len(self.running) <= self.config.max_num_seqs
