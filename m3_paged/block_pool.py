"""The physical KV blocks: which are free, how many tables hold each. No tensors, no requests."""

from __future__ import annotations

from collections import deque


class BlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts. Every operation takes O(1)."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.reset()

    def __repr__(self) -> str:
        return f"<BlockPool: {self.num_used} of {self.num_blocks} blocks used>"

    def reset(self) -> None:
        """Make all blocks free, lowest first."""
        self.free_blocks = deque(range(self.num_blocks))
        """Free blocks, longest free first."""
        self.ref_counts = [0] * self.num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return len(self.free_blocks)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """Take a free block; its reference count becomes 1. The caller makes sure that one is
        free."""
        block = self.free_blocks.popleft()
        assert self.ref_counts[block] == 0, f"block {block} is free and has owners"
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Note that one more table holds the block."""
        assert self.ref_counts[block] > 0, f"block {block} is free and cannot be shared"
        self.ref_counts[block] += 1

    def free(self, block: int) -> None:
        """Note that one table fewer holds the block; after the last table the block is free."""
        assert self.ref_counts[block] > 0, f"block {block} is freed twice"
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_blocks.append(block)
