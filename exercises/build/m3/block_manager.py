"""M3, written by you: block tables, which say where each request's tokens lie.

    request a, 6 tokens, block_size 4          block pool
    block table [2, 0]                         0 |a4 a5  .  . |
        token 5 -> table[5 // 4] = 0           1 | .  .  .  . |  free
                   offset 5 % 4  = 1           2 |a0 a1 a2 a3 |
                   slot 0 * 4 + 1 = 1          3 | .  .  .  . |  free

A table grows by one block when its last is full. Two tables may name the same block (a shared
prompt); a request that writes into such a block first gets a copy of it (copy-on-write).

`self.events` tells the trace and its page what happens to blocks: append a `KVEvent`
(milestone_llm/core/kv.py) where a docstring says so.
"""

from __future__ import annotations

from collections import Counter

from exercises.build.m3.block_pool import BlockPool
from milestone_llm.core.kv import KVEvent


class BlockManager:
    """Maps requests to block tables over a pool.

    Args:
        events: what happens to blocks is appended here.
    """

    def __init__(self, pool: BlockPool, block_size: int, events: list[KVEvent]) -> None:
        self.pool = pool
        self.block_size = block_size
        self.events = events
        self.block_tables: dict[str, list[int]] = {}
        """Block table of each request that has one: a list that grows with the request."""
        self.num_copies = 0
        """Blocks that `append` has had copied."""

    def __repr__(self) -> str:
        return f"<BlockManager {self.block_tables}, {self.pool}>"

    # -- a table of one's own: yours ---------------------------------------------------------

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        raise NotImplementedError("step 3: divide and round up.")

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a new table for `num_tokens` tokens fits into the free blocks."""
        raise NotImplementedError("step 3: compare num_blocks_for with what the pool has free.")

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Give a request a table with room for its first `num_tokens` tokens.

        Event: `KVEvent("alloc", request_id, new blocks)`.
        """
        raise NotImplementedError(
            "step 3: as many blocks of the pool as the tokens need, in self.block_tables."
        )

    def free(self, request_id: str) -> None:
        """Drop a request's table. Its last block is given back first.

        Event: `KVEvent("free", request_id, table, held)`, where `held` are those blocks of the
        table that other requests still hold.
        """
        raise NotImplementedError("step 3: the pool takes back one block after the other.")

    # -- a table grows: yours ----------------------------------------------------------------

    def can_append(self, request_id: str, start: int, end: int) -> bool:
        """Whether tokens `start .. end - 1` can be written with the blocks that are free.

        The table may have to grow, and blocks that would be written into may have to be copied.
        """
        raise NotImplementedError(
            "step 4: how many blocks are lacking for `end` tokens, and are so many free? "
            "Step 5 adds one for each block that must be copied."
        )

    def append(self, request_id: str, start: int, end: int) -> list[tuple[int, int]]:
        """Make tokens `start .. end - 1` writable: the request owns every block they fall into.

        Events: `KVEvent("copy_on_write", request_id, [shared, own])` for each copy, then "alloc"
        with the new blocks if there are any.

        Returns:
            Copies to make before the write, as (from block, to block).
        """
        raise NotImplementedError(
            "step 4: let the table grow; there is nothing to copy: []. Step 5: a block with "
            "reference count above 1 that is written into is replaced in this table."
        )

    # -- blocks in several tables: yours -----------------------------------------------------

    def adopt(self, request_id: str, blocks: list[int]) -> None:
        """Give a request a table of its own that begins with blocks that it shares.

        Event: `KVEvent("share", request_id, blocks)`, if there are any.
        """
        raise NotImplementedError("step 5: the pool counts one more table for each block.")

    # -- as it is ----------------------------------------------------------------------------

    def describe(self, num_tokens: int) -> str:
        """How much is wanted and how much there is, for people."""
        wanted = self.num_blocks_for(num_tokens)
        return f"blocks needed {wanted}, free {self.pool.num_free}"

    def fork(self, parent_id: str, child_id: str) -> None:
        """Give a child the same table as its parent: same blocks, one more reference each."""
        self.adopt(child_id, self.block_tables[parent_id])

    def reset(self) -> None:
        """Drop all tables, in whatever state the books are."""
        for request_id, table in self.block_tables.items():
            self.events.append(KVEvent("free", request_id, table))
        self.block_tables = {}
        self.pool.reset()

    def check_invariants(self) -> None:
        """Assert that reference counts equal table entries, and that free + owned == total."""
        held = Counter(block for table in self.block_tables.values() for block in table)
        for block, count in enumerate(self.pool.ref_counts):
            assert held[block] == count, (
                f"block {block} is in {held[block]} tables, its reference count is {count}"
            )
        free = self.pool.free_blocks
        assert len(free) + len(held) == self.pool.num_blocks, "blocks lost"
        assert not any(block in held for block in free), "a block is both free and owned"
