"""M3, written by you: the physical KV blocks. Which are free, how many tables hold each.

No tensors and no requests: a block is a number. Begin here: `python -m exercises.build m3`
"""

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
        """All blocks are free, lowest first."""
        self.free_blocks = deque(range(self.num_blocks))
        """Free blocks, longest free first."""
        self.ref_counts = [0] * self.num_blocks
        """By block, how many tables hold it."""

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return len(self.free_blocks)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self.num_free

    # -- yours -------------------------------------------------------------------------------

    def allocate(self) -> int:
        """Take the block that has been free the longest; one table holds it now."""
        raise NotImplementedError("step 1: a deque gives its oldest entry with popleft().")

    def share(self, block: int) -> None:
        """One more table holds the block. Only a bug shares a free one: AssertionError."""
        raise NotImplementedError("step 2: assert first, then count.")

    def free(self, block: int) -> None:
        """One table fewer holds the block; after the last it is free.

        Only a bug frees a free one: AssertionError.
        """
        raise NotImplementedError(
            "step 1: count down; a block that nobody holds goes to the end of the free ones. "
            "Step 2 makes sure that somebody holds it."
        )
