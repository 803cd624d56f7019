"""Block tables: which blocks hold each request's tokens. Pure bookkeeping, no tensors.

    request a, 6 tokens, block_size 4          block pool
    block table [2, 0]                         0 |a4 a5  .  . |
        token 5 -> table[5 // 4] = 0           1 | .  .  .  . |  free
                   offset 5 % 4  = 1           2 |a0 a1 a2 a3 |
                   slot 0 * 4 + 1 = 1          3 | .  .  .  . |  free

A table grows by one block when its last is full: at most `block_size - 1` reserved slots hold
nothing. Two tables may name the same block (a shared prompt); a request that writes into such a
block first gets a copy of it (copy-on-write).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from typing import Protocol

from milestone_llm.core.kv import KVEvent


class Pool(Protocol):
    """The physical blocks: `BlockPool`, or from m4_prefix_chunked on one that remembers content."""

    num_blocks: int
    ref_counts: list[int]

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""

    @property
    def free_blocks(self) -> Collection[int]:
        """Blocks that no table holds, by number."""

    def allocate(self) -> int:
        """Take a free block; its reference count becomes 1."""

    def share(self, block: int) -> None:
        """Note that one more table holds the block."""

    def free(self, block: int) -> None:
        """Note that one table fewer holds the block."""

    def reset(self) -> None:
        """Make all blocks free."""


class BlockManager:
    """Maps requests to block tables over a pool.

    Args:
        events: changes of blocks are appended here.
    """

    def __init__(self, pool: Pool, block_size: int, events: list[KVEvent]) -> None:
        self.pool = pool
        self.block_size = block_size
        self.events = events
        self.block_tables: dict[str, list[int]] = {}
        """Block table of each request that has one: a list that grows with the request."""
        self.num_copies = 0

    def __repr__(self) -> str:
        return f"<BlockManager {self.block_tables}, {self.pool}>"

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a new table for `num_tokens` tokens fits into the free blocks."""
        return self.num_blocks_for(num_tokens) <= self.pool.num_free

    def describe(self, num_tokens: int) -> str:
        """Return how much is wanted and how much there is, in words for people."""
        wanted = self.num_blocks_for(num_tokens)
        return f"blocks needed {wanted}, free {self.pool.num_free}"

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Give a request a table with room for its first `num_tokens` tokens."""
        self.block_tables[request_id] = []
        self._grow(request_id, num_tokens)

    def adopt(self, request_id: str, blocks: list[int]) -> None:
        """Give a request a table that begins with blocks whose content it shares."""
        for block in blocks:
            self.pool.share(block)
        self.block_tables[request_id] = list(blocks)
        if blocks:
            self.events.append(KVEvent("share", request_id, list(blocks)))

    def can_append(self, request_id: str, start: int, end: int) -> bool:
        """Whether tokens `start .. end - 1` can be written, growing and copying as needed."""
        num_touched = self.num_blocks_for(end) - start // self.block_size
        if num_touched <= self.pool.num_free:  # enough, even if all of them are new or shared
            return True
        table = self.block_tables[request_id]
        num_new = max(0, self.num_blocks_for(end) - len(table))
        return num_new + len(self._shared_indices(table, start, end)) <= self.pool.num_free

    def append(self, request_id: str, start: int, end: int) -> list[tuple[int, int]]:
        """Make tokens `start .. end - 1` writable: own every block that they fall into.

        Returns:
            Copies to make before the write, as (from block, to block).
        """
        table, first = self.block_tables[request_id], start // self.block_size
        is_inside = first == (end - 1) // self.block_size and first < len(table)
        if is_inside and self.pool.ref_counts[table[first]] == 1:  # so it is for most tokens
            return []
        copies = []
        for index in self._shared_indices(table, start, end):
            shared, own = table[index], self.pool.allocate()
            self.pool.free(shared)
            table[index] = own
            copies.append((shared, own))
            self.events.append(KVEvent("copy_on_write", request_id, [shared, own]))
        self.num_copies += len(copies)
        self._grow(request_id, end)
        return copies

    def fork(self, parent_id: str, child_id: str) -> None:
        """Give a child the same table as its parent: same blocks, one more reference each."""
        self.adopt(child_id, self.block_tables[parent_id])

    def free(self, request_id: str) -> None:
        """Drop a request's table, last block first."""
        table = self.block_tables.pop(request_id)
        for block in reversed(table):
            self.pool.free(block)
        held = [block for block in table if self.pool.ref_counts[block]]
        self.events.append(KVEvent("free", request_id, table, held))

    def reset(self) -> None:
        """Drop all tables, even if the bookkeeping is broken."""
        for request_id, table in self.block_tables.items():
            self.events.append(KVEvent("free", request_id, table))
        self.block_tables = {}
        self.pool.reset()

    def _grow(self, request_id: str, num_tokens: int) -> None:
        table = self.block_tables[request_id]
        num_new = self.num_blocks_for(num_tokens) - len(table)
        if num_new > 0:
            new = [self.pool.allocate() for _ in range(num_new)]
            table += new
            self.events.append(KVEvent("alloc", request_id, new))

    def _shared_indices(self, table: list[int], start: int, end: int) -> list[int]:
        """Return the table indices of blocks that `start .. end - 1` would write into and that are
        in other tables too."""
        touched = range(start // self.block_size, min(self.num_blocks_for(end), len(table)))
        return [index for index in touched if self.pool.ref_counts[table[index]] > 1]

    def check_invariants(self) -> None:
        """Assert that reference counts equal table entries, and that free + owned == total."""
        held = Counter(block for table in self.block_tables.values() for block in table)
        for block, count in enumerate(self.pool.ref_counts):
            assert held[block] == count, f"block {block}: {held[block]} tables, count {count}"
        free = self.pool.free_blocks
        assert len(free) + len(held) == self.pool.num_blocks, "blocks lost"
        assert not any(block in held for block in free), "a block is both free and owned"
