"""Drops or swaps a running request's KV when others need the memory (PagedAttention, section 4.5).

    recompute   the blocks are dropped; prompt and output are computed again later
    swap        the blocks are copied to host memory, and back when there is room again

Either way the request keeps its tokens, the token sampled last included.
"""

from __future__ import annotations

from milestone_llm.core.kv import KVEvent
from milestone_llm.core.plan import Preemption, StepPlan
from milestone_llm.core.request import Request, RequestStatus

from .block_manager import BlockManager
from .block_pool import BlockPool


class Preempter:
    """Takes blocks from running requests, and brings swapped ones back.

    Args:
        kv: block tables on the device.
        num_host_blocks: blocks of host memory to swap to; 0: always recompute.
    """

    def __init__(self, kv: BlockManager, num_host_blocks: int) -> None:
        self.kv = kv
        self.host = BlockManager(BlockPool(num_host_blocks), kv.block_size, events=[])
        """Block tables of swapped requests, in host memory."""
        self.num_preemptions = 0

    def preempt(self, victim: Request, plan: StepPlan, reason: str) -> None:
        """Take a running request's blocks. The caller queues the request again."""
        plan.preempted.append(Preemption(victim, reason))
        plan.waiting_reasons[victim.request_id] = reason
        self.num_preemptions += 1
        victim.num_preemptions += 1
        if self.host.pool.num_blocks and self._swap_out(victim, plan, victim.num_computed_tokens):
            victim.become(RequestStatus.SWAPPED)
        else:
            victim.become(RequestStatus.WAITING)
            victim.num_computed_tokens = 0
        self.kv.free(victim.request_id)

    def _swap_out(self, victim: Request, plan: StepPlan, num_tokens: int) -> bool:
        """Copy so many tokens' KV to host memory, if there is room. Returns whether there is."""
        if not self.host.can_allocate(num_tokens):
            return False
        self.host.allocate(victim.request_id, num_tokens)
        moves = self._moves(victim)
        plan.swap_outs += moves
        self._note("swap_out", victim, [block for block, _ in moves])
        return True

    def swap_in(self, request: Request, plan: StepPlan) -> None:
        """Bring a swapped request's KV back into the blocks that it has been given."""
        # The table has room for the next token too; only the KV that was swapped out comes back.
        moves = self._moves(request)
        plan.swap_ins += [(host_block, block) for block, host_block in moves]
        self.host.free(request.request_id)
        self._note("swap_in", request, [block for block, _ in moves])

    def reset(self) -> None:
        """Give back all host memory."""
        self.host.reset()

    def _moves(self, request: Request) -> list[tuple[int, int]]:
        """Return pairs of device block and host block.

        A prompt that is computed in chunks also has device blocks that are still empty.
        """
        device = self.kv.block_tables[request.request_id]
        return list(zip(device, self.host.block_tables[request.request_id], strict=False))

    def _note(self, event: str, request: Request, blocks: list[int]) -> None:
        self.host.events.clear()  # host blocks show as swaps
        self.kv.events.append(KVEvent(event, request.request_id, blocks))
