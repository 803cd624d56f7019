from __future__ import annotations

from m4_prefix_chunked.caching_pool import CachingBlockPool


class EvictingPool(CachingBlockPool):
    """Blocks that were never found go first, the longest free of them; then the others, likewise.

    So a block has to be found once before it counts, and what is out of use grows old among those
    that were found. (Databases call this a segmented LRU.) A count of hits would not fade.
    """

    def reset(self) -> None:
        super().reset()
        self.found: set[int] = set()

    def share(self, block: int) -> None:
        super().share(block)
        self.found.add(block)

    def forget(self, block: int) -> None:
        super().forget(block)
        self.found.discard(block)

    def allocate(self) -> int:
        oldest = next(iter(self.free_blocks))
        victim = next((block for block in self.free_blocks if block not in self.found), oldest)
        self.free_blocks.move_to_end(victim, last=False)
        return super().allocate()
