"""A block pool whose free blocks keep their content, and can be found again by its hash.

hash -> block                      free list, longest free first
h(a) -> 4   in use                 [7, 9, 2]     9 and 2 hold h(c) and h(b): still useful
h(b) -> 2   free, cached           allocate takes 7, then 9 (evicting h(c)), then 2
h(c) -> 9   free, cached           a hit on h(b) takes 2 off the list, from wherever it is
"""

from __future__ import annotations

from m3_paged.block_pool import BlockPool


class CachingBlockPool(BlockPool):
    """Blocks with reference counts and content hashes. Every operation takes O(1)."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.block_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.num_cached_free = 0
        """Free blocks whose content can still be found."""
        self.evicted: list[int] = []
        """Blocks that lost their content to an allocation since the manager last asked."""

    def allocate(self) -> int:
        """Take the block that has been free the longest; what it cached is forgotten."""
        block = super().allocate()
        if block in self.hash_of:
            self.num_cached_free -= 1
            self.forget(block)
            self.evicted.append(block)
        return block

    def share(self, block: int) -> None:
        """One more table holds the block; a free one comes off the free list."""
        if self.ref_counts[block] == 0:
            assert block in self.hash_of, f"block {block} is free and its content forgotten"
            del self.free_blocks[block]
            self.num_cached_free -= 1
            self.ref_counts[block] = 1
            self.watermark = max(self.watermark, self.num_used)
        else:
            super().share(block)

    def free(self, block: int) -> None:
        """One table fewer holds the block; after the last it is free, its content kept."""
        super().free(block)
        if self.ref_counts[block] == 0 and block in self.hash_of:
            self.num_cached_free += 1

    def remember(self, block: int, block_hash: bytes) -> bool:
        """Make a used block findable, unless another block has the same content already.

        Returns:
            Whether the block was the first of its content. Copies are not merged.
        """
        if block_hash in self.block_of or block in self.hash_of:
            return False
        self.block_of[block_hash] = block
        self.hash_of[block] = block_hash
        return True

    def forget(self, block: int) -> None:
        """Make a block unfindable, be it in use or free."""
        self.num_cached_free -= self.ref_counts[block] == 0
        del self.block_of[self.hash_of.pop(block)]

    def forget_all(self) -> None:
        """Make every block unfindable. The caller has made sure that none is in use."""
        self.block_of.clear()
        self.hash_of.clear()
        self.num_cached_free = 0
