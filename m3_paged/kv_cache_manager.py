"""KV memory in blocks as the scheduler sees it: block tables, preemption and host memory.

    can_allocate, allocate      a request comes, or comes back
    append, fork                it grows; completions of its prompt share its blocks
    preempt, free, reset        it goes

This class works on requests; `BlockManager`, which it calls, on ids and counts of tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request, RequestStatus

from .block_manager import BlockManager
from .block_pool import BlockPool
from .config import EngineConfig
from .kv_usage import check_tables, kv_stats, paged_kv_usage
from .preemption import Preempter


class KVCacheManager:
    """Gives requests blocks as they grow, and takes them back."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self.events: list[KVEvent] = []
        self.blocks = BlockManager(BlockPool(num_blocks), config.block_size, self.events)
        """Block tables on the device."""
        self.preempter = Preempter(self.blocks, config.num_host_blocks(num_blocks))

    def __repr__(self) -> str:
        return f"<KVCacheManager {self.blocks.block_tables}, {self.blocks.pool}>"

    def can_allocate(self, request: Request) -> bool:
        """Whether there is room for all known tokens of a waiting request."""
        return self.blocks.can_allocate(request.num_tokens)

    def describe(self, request: Request) -> str:
        """Return how much is wanted and how much there is, in words for people."""
        return self.blocks.describe(request.num_tokens)

    def allocate(self, request: Request, plan: StepPlan) -> None:
        """Give a request blocks for all its known tokens; swapped-out KV comes back."""
        self.blocks.allocate(request.request_id, request.num_tokens)
        if request.status is RequestStatus.SWAPPED:
            self.preempter.swap_in(request, plan)

    def blocks_of(self, request: Request) -> list[int]:
        """Return where the request's KV is: its block table."""
        return self.blocks.block_tables[request.request_id]

    def append(self, request: Request, plan: StepPlan) -> bool:
        """Make room for a running request's next token. The plan notes the copies for that.

        Returns:
            False, with nothing done, if too few blocks are free.
        """
        name, start, end = request.request_id, request.num_computed_tokens, request.num_tokens
        if not self.blocks.can_append(name, start, end):
            return False
        plan.copies += self.blocks.append(name, start, end)
        return True

    def fork(self, parent: Request, child: Request) -> None:
        """Let a further completion of a prompt share the blocks of the one that computes it."""
        self.blocks.fork(parent.request_id, child.request_id)

    def preempt(self, victim: Request, plan: StepPlan, reason: str) -> None:
        """Take a running request's blocks, perhaps to host memory. The caller queues it again."""
        self.preempter.preempt(victim, plan, reason)

    def free(self, request: Request) -> None:
        """Take back a request's blocks, on the device or in host memory, if it has any."""
        if request.request_id in self.blocks.block_tables:
            self.blocks.free(request.request_id)
        if request.request_id in self.preempter.host.block_tables:
            self.preempter.host.free(request.request_id)

    def reset(self) -> None:
        """Take back all blocks, even if the bookkeeping is broken."""
        self.blocks.reset()
        self.preempter.reset()

    @property
    def num_used(self) -> int:
        """Blocks that requests own."""
        return self.blocks.pool.num_used

    def usage(self, running: Sequence[Request], watermark: int) -> KVUsage:
        """Return how full KV memory is. Waste is at most one partly filled block a request."""
        return paged_kv_usage(self.blocks, running, watermark)

    def stats(self, running: Sequence[Request]) -> dict[str, object]:
        """Return preemptions, copies, and places that are reserved but empty."""
        return kv_stats(self.blocks, self.preempter, running)

    def check(self, running: Sequence[Request], waiting: Iterable[Request]) -> None:
        """Assert that no block is lost and that tables belong to running or swapped requests."""
        check_tables(self.blocks, self.preempter, running, waiting)
