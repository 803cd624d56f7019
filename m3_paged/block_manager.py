"""Block tables: where each request's tokens lie. Pure bookkeeping, no tensors.

    request a, 6 tokens, block_size 4          block pool
    block table [2, 0]                         0 |a4 a5  .  . |
        token 5 -> table[5 // 4] = 0           1 | .  .  .  . |  free
                   offset 5 % 4  = 1           2 |a0 a1 a2 a3 |
                   slot 0 * 4 + 1 = 1          3 | .  .  .  . |  free

A table grows by one block when its last is full: at most `block_size - 1` reserved slots hold
nothing. Two tables may name the same block (a shared prompt); whoever wants to write into such a
block first gets a copy of it (copy-on-write).
"""

from __future__ import annotations

from collections import Counter

from milestone_llm.trace.tracer import KVEvent

from .block_pool import BlockPool


class BlockManager:
    """Maps requests to block tables over one `BlockPool`."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self.owners: dict[str, list[int]] = {}
        """Block table of each request that has one."""
        self.num_copies = 0
        self.events: list[KVEvent] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int) -> bool:
        """Whether a new table for `num_tokens` tokens fits into what is free."""
        return self.num_blocks_for(num_tokens) <= self.pool.num_free

    def describe(self, num_tokens: int) -> str:
        """How much is wanted and how much there is, for people."""
        wanted = self.num_blocks_for(num_tokens)
        return f"{num_tokens} tokens need {wanted} blocks, {self.pool.num_free} are free"

    def blocks_of(self, request_id: str) -> list[int]:
        """A request's block table: the list itself, which grows with the request."""
        return self.owners[request_id]

    def allocate(self, request_id: str, num_tokens: int) -> None:
        """Give a request a table with room for its first `num_tokens` tokens."""
        self.owners[request_id] = []
        self._grow(request_id, num_tokens)

    def can_append(self, request_id: str, start: int, end: int) -> bool:
        """Whether tokens `start .. end - 1` can be written, growing and copying as needed."""
        table = self.owners[request_id]
        num_new = max(0, self.num_blocks_for(end) - len(table))
        return num_new + len(self._shared_indices(table, start, end)) <= self.pool.num_free

    def append(self, request_id: str, start: int, end: int) -> list[tuple[int, int]]:
        """Make tokens `start .. end - 1` writable: own every block they fall into.

        Returns:
            Copies to make before the write, as (from block, to block).
        """
        table = self.owners[request_id]
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
        table = self.owners[parent_id]
        for block in table:
            self.pool.share(block)
        self.owners[child_id] = list(table)
        self.events.append(KVEvent("share", child_id, list(table)))

    def free(self, request_id: str) -> None:
        """Drop a request's table, last block first."""
        table = self.owners.pop(request_id)
        for block in reversed(table):
            self.pool.free(block)
        self.events.append(KVEvent("free", request_id, table))

    def _grow(self, request_id: str, num_tokens: int) -> None:
        table = self.owners[request_id]
        num_new = self.num_blocks_for(num_tokens) - len(table)
        if num_new > 0:
            new = [self.pool.allocate() for _ in range(num_new)]
            table += new
            self.events.append(KVEvent("alloc", request_id, new))

    def _shared_indices(self, table: list[int], start: int, end: int) -> list[int]:
        """Which blocks that `start .. end - 1` would write into have other owners too."""
        touched = range(start // self.block_size, min(self.num_blocks_for(end), len(table)))
        return [index for index in touched if self.pool.is_shared(table[index])]

    def check_invariants(self) -> None:
        """Assert that reference counts equal table entries, and that free + owned == total."""
        held = Counter(block for table in self.owners.values() for block in table)
        for block, count in enumerate(self.pool.ref_counts):
            assert held[block] == count, f"block {block}: {held[block]} tables, count {count}"
        free = self.pool.free_blocks
        assert len(free) + len(held) == self.pool.num_blocks, "blocks lost"
        assert not any(block in held for block in free), "a block is both free and owned"
