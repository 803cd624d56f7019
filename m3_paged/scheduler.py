"""Scheduling when memory is given out block by block: growth, preemption, resumption.

A request is admitted when the blocks for its known tokens are free, and grows as it generates. When
a running request needs a block and none is free, the most recently admitted one is preempted. Its
blocks are freed and it is recomputed later, or its KV moves to host memory and back (PagedAttention
section 4.5): the price of admitting more requests than could all grow to full length.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from m2_batching.scheduler import Scheduler as SlotScheduler
from milestone_llm.engine.plan import Preemption, ScheduledRequest, StepPlan
from milestone_llm.engine.request import Request, RequestOutput, RequestStatus, SampledToken
from milestone_llm.trace.tracer import KVEvent, KVUsage

from .block_manager import BlockManager
from .config import EngineConfig


@dataclass
class PagedStepPlan(StepPlan):
    """A `StepPlan` with the block moves that come before its forward, in this order."""

    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    """(device block, host block)"""
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    """(host block, device block)"""
    copies: list[tuple[int, int]] = field(default_factory=list)
    """Copy-on-write: (device block, device block)"""


class Scheduler(SlotScheduler):
    """Replaces how running requests get their memory; admission is that of M2."""

    config: EngineConfig
    kv: BlockManager

    def __init__(self, config: EngineConfig, max_model_len: int, num_blocks: int) -> None:
        config.check_holds_one_request(max_model_len, num_blocks)
        self.num_blocks = num_blocks
        super().__init__(config, max_model_len)
        self.host = BlockManager(config.num_host_blocks(num_blocks), config.block_size)
        """Block tables of swapped requests, in host memory."""
        self.num_preemptions = 0

    def build_kv_manager(self) -> BlockManager:
        """Block tables over a pool."""
        return BlockManager(self.num_blocks, self.config.block_size)

    def validate(self, request: Request) -> None:
        """Refuse also more completions than may run at once.

        Raises:
            ValueError: the prompt is larger than a step, or n larger than `max_num_seqs`.
        """
        super().validate(request)
        self.check_n(request)

    def check_n(self, request: Request) -> None:
        """Completions of a prompt fork from it all at once.

        Raises:
            ValueError: they are more than may run.
        """
        if request.sampling_params.n > self.config.max_num_seqs:
            raise ValueError(
                f"n={request.sampling_params.n} completions start together, but "
                f"max_num_seqs={self.config.max_num_seqs}"
            )

    def abort(self, request: Request) -> None:
        """End a request in whatever state it is, also one that was not yet forked."""
        if request.leader is not None and request in request.leader.forks:
            request.leader.forks.remove(request)
            request.finish("abort")
            self.ended.append(request)
        else:
            super().abort(request)

    # -- a step ------------------------------------------------------------------------------

    def schedule(self) -> PagedStepPlan:
        """Plan the next step: grow the running requests, preempting if need be, then admit."""
        plan = PagedStepPlan()
        self._grow_running(plan)
        if not plan.preempted:  # memory is short: newcomers would only be preempted next
            self._admit(plan, budget=self.config.max_num_batched_tokens - len(plan.rows))
        return plan

    def _grow_running(self, plan: PagedStepPlan) -> None:
        """A row for each running request, the last to be preempted first."""
        for request in self.by_seniority():
            if request.status is RequestStatus.RUNNING and self._make_room(request, plan):
                plan.rows.append(self._row(request))

    def _make_room(self, request: Request, plan: PagedStepPlan) -> bool:
        """Get the blocks for a running request's next token, preempting as long as it takes.

        Returns:
            False if the request had to go itself.
        """
        start, end = request.num_computed_tokens, request.num_tokens
        while not self.kv.can_append(request.request_id, start, end):
            victim = self.by_seniority()[-1]
            self._preempt(victim, plan, f"no free block for {request.request_id}")
            if victim is request:
                return False
        plan.copies += self.kv.append(request.request_id, start, end)
        return True

    def by_seniority(self) -> list[Request]:
        """Running requests; the last is the victim when memory runs out.

        Senior is who was admitted earlier, or who has the lower (priority, arrival). A step serves
        seniors first, so a victim has no row in it yet.
        """
        if self.config.policy == "priority":
            return sorted(self.running, key=self.waiting.key)
        return list(self.running)

    def _preempt(self, victim: Request, plan: PagedStepPlan, reason: str) -> None:
        """Take a running request's blocks; it goes back to the queue and keeps its tokens."""
        plan.preempted.append(Preemption(victim, reason))
        self.num_preemptions += 1
        victim.metrics.num_preemptions += 1
        self.running.remove(victim)
        num_tokens = victim.num_computed_tokens
        if self.config.preemption == "swap" and self.host.can_allocate(num_tokens):
            self._swap_out(victim, plan)
        else:
            victim.status = RequestStatus.WAITING
            victim.num_computed_tokens = 0
        self.kv.free(victim.request_id)
        self.waiting.add(victim)

    def _swap_out(self, request: Request, plan: PagedStepPlan) -> None:
        request.status = RequestStatus.SWAPPED
        self.host.allocate(request.request_id, request.num_computed_tokens)
        blocks = self.kv.blocks_of(request.request_id)
        # A prompt that is computed in chunks (from M4 on) also has blocks that are still empty.
        moves = list(zip(blocks, self.host.blocks_of(request.request_id), strict=False))
        plan.swap_outs += moves
        self.kv.events.append(KVEvent("swap_out", request.request_id, [b for b, _ in moves]))

    def _start(self, request: Request, plan: StepPlan) -> ScheduledRequest:
        """Admit a new request, or resume a preempted one."""
        assert isinstance(plan, PagedStepPlan)
        is_swapped = request.status is RequestStatus.SWAPPED
        row = super()._start(request, plan)
        if is_swapped:
            # The table has room for the next token too; only what was swapped out comes back.
            moves = list(zip(self.host.blocks_of(request.request_id), row.blocks, strict=False))
            plan.swap_ins += moves
            self.host.free(request.request_id)
            self.kv.events.append(KVEvent("swap_in", request.request_id, [b for _, b in moves]))
        if request.metrics.num_preemptions:
            plan.resumed.append(plan.admitted.pop())
        else:
            plan.admitted += request.forks
        return row

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Why a request and its forks cannot join a step; None if they can."""
        return self.no_seat_reason(request) or super().reason_to_wait(request, budget)

    def no_seat_reason(self, request: Request) -> str | None:
        """Why too many run already for a request and its forks to start; None if they can."""
        num_running = len(self.running) + sum(len(running.forks) for running in self.running)
        if num_running + len(request.forks) >= self.config.max_num_seqs:
            return f"max_num_seqs={self.config.max_num_seqs}, {num_running} are running"
        return None

    def update(self, plan: StepPlan, sampled: dict[str, SampledToken]) -> list[RequestOutput]:
        """As before; and where a prompt is complete, its further completions fork from it."""
        leaders = [row.request for row in plan.rows if row.samples and row.request.forks]
        for leader in leaders:
            for fork in leader.forks:
                self.kv.fork(leader.request_id, fork.request_id)
                fork.status = RequestStatus.RUNNING
                fork.num_computed_tokens = leader.num_tokens
                self.running.append(fork)
        outputs = super().update(plan, sampled)
        for leader in leaders:
            leader.forks = []
        return outputs

    def fail(self, plan: StepPlan) -> list[RequestOutput]:
        """As before; and whoever was swapped out in this step is recomputed: the copy is void."""
        for preemption in plan.preempted:
            request = preemption.request
            if request.status is RequestStatus.SWAPPED:
                self.host.free(request.request_id)
                request.status = RequestStatus.WAITING
                request.num_computed_tokens = 0
        return super().fail(plan)

    def _release(self, finished: list[Request]) -> None:
        """Free the blocks of requests that are done, on the device or in host memory."""
        super()._release(finished)
        for request in finished:
            if request.request_id in self.host.owners:
                self.host.free(request.request_id)

    # -- what the tracer asks ----------------------------------------------------------------

    def drain_events(self) -> list[KVEvent]:
        """Events of device blocks; those of host blocks show as swaps."""
        self.host.events.clear()
        return super().drain_events()

    def kv_usage(self) -> KVUsage:
        """KV memory in blocks. Waste is at most one partly filled block a request."""
        pool = self.kv.pool
        return KVUsage(
            unit="block",
            total=pool.num_blocks,
            used=pool.num_used,
            watermark=pool.watermark,
            reserved_tokens=pool.num_used * self.config.block_size,
            stored_tokens=sum(self.block_fill().values()),
        )

    def block_fill(self) -> dict[int, int]:
        """Tokens stored in each used block; a shared block counts once."""
        fill: dict[int, int] = {}
        size = self.config.block_size
        for request in self.running:
            for index, block in enumerate(self.kv.blocks_of(request.request_id)):
                stored = min(size, max(0, request.num_computed_tokens - index * size))
                fill[block] = max(stored, fill.get(block, 0))
        return fill

    def check_invariants(self) -> None:
        """Assert that no block is lost, on the device or in host memory."""
        super().check_invariants()
        self.host.check_invariants()
        swapped = {r.request_id for r in self.waiting if r.status is RequestStatus.SWAPPED}
        assert swapped == set(self.host.owners), "host blocks belong to swapped requests"
