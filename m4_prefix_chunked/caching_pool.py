"""A block pool whose free blocks keep their content, and can be found again by its hash.

hash -> block                      free list: blocks without a hash, then longest free first
h(a) -> 4   in use                 [7, 9, 2]     9 and 2 hold h(c) and h(b): still useful
h(b) -> 2   free, cached           allocate takes 7, then 9 (evicting h(c)), then 2
h(c) -> 9   free, cached           a hit on h(b) takes 2 off the list, from wherever it is
"""

from __future__ import annotations

from collections import OrderedDict

from milestone_llm.core.kv import KVEvent


class CachingBlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts and content hashes. Every operation takes
    O(1).

    Args:
        events: evictions are appended here.
    """

    def __init__(self, num_blocks: int, events: list[KVEvent]) -> None:
        self.num_blocks = num_blocks
        self.events = events
        self.num_evictions = 0
        self.reset()

    def __repr__(self) -> str:
        used = f"{self.num_used} of {self.num_blocks} blocks used"
        return f"<CachingBlockPool: {used}, {len(self.block_of)} findable>"

    def reset(self) -> None:
        """Make all blocks free, lowest first, and forget their content."""
        self.free_blocks = OrderedDict.fromkeys(range(self.num_blocks))
        """Free blocks: those without findable content, then longest free first. A dict, so that one
        can be taken from the middle."""
        self.ref_counts = [0] * self.num_blocks
        self.block_of: dict[bytes, int] = {}
        self.hash_of: dict[int, bytes] = {}
        self.num_cached_free = 0
        """Free blocks whose content can still be found."""

    @property
    def num_free(self) -> int:
        """Blocks that no table holds."""
        return len(self.free_blocks)

    @property
    def num_used(self) -> int:
        """Blocks that at least one table holds."""
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """Take the first free block. Its content, if it has any, is forgotten."""
        block, _ = self.free_blocks.popitem(last=False)
        assert self.ref_counts[block] == 0, f"block {block} is free and has owners"
        if block in self.hash_of:
            self.num_evictions += 1
            self.forget(block)
            self.events.append(KVEvent("evict", None, [block]))
        self.ref_counts[block] = 1
        return block

    def share(self, block: int) -> None:
        """Note that one more table holds the block; a free block comes off the free list."""
        if self.ref_counts[block]:
            self.ref_counts[block] += 1
            return
        assert block in self.hash_of, f"block {block} is free and its content forgotten"
        del self.free_blocks[block]
        self.num_cached_free -= 1
        self.ref_counts[block] = 1

    def free(self, block: int) -> None:
        """Note that one table fewer holds the block. After the last table the block is free, and
        its content is kept. A block whose content nothing can find is given out next."""
        assert self.ref_counts[block] > 0, f"block {block} is freed twice"
        self.ref_counts[block] -= 1
        if self.ref_counts[block] == 0:
            self.free_blocks[block] = None
            self.num_cached_free += block in self.hash_of
            if self.hash_of and block not in self.hash_of:  # nothing findable goes for it
                self.free_blocks.move_to_end(block, last=False)

    # -- content -----------------------------------------------------------------------------

    def remember(self, block: int, block_hash: bytes) -> bool:
        """Make a used block findable, unless another block has the same content already.

        Returns:
            Whether the block is the first with its content. Copies are not merged.
        """
        if block_hash in self.block_of or block in self.hash_of:
            return False
        self.block_of[block_hash] = block
        self.hash_of[block] = block_hash
        return True

    def forget(self, block: int) -> None:
        """Make a block unfindable, whether it is in use or free."""
        self.num_cached_free -= self.ref_counts[block] == 0
        del self.block_of[self.hash_of.pop(block)]

    def check_invariants(self) -> None:
        """Assert that hashes and blocks map one to one and cached free blocks are counted."""
        assert {block: h for h, block in self.block_of.items()} == self.hash_of
        num_cached_free = sum(block in self.hash_of for block in self.free_blocks)
        assert num_cached_free == self.num_cached_free, "cached free blocks miscounted"
