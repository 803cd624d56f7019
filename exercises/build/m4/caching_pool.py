"""M4, written by you: a block pool whose free blocks keep their content until they are reused.

hash -> block                      free list, longest free first
h(a) -> 4   in use                 [7, 9, 2]     9 and 2 hold h(c) and h(b): still useful
h(b) -> 2   free, cached           allocate takes 7, then 9 (evicting h(c)), then 2
h(c) -> 9   free, cached           a hit on h(b) takes 2 off the list, from wherever it is

Steps 2 and 3: `python -m exercises.build m4`
"""

from __future__ import annotations

from collections import OrderedDict

from milestone_llm.core.kv import KVEvent


class CachingBlockPool:
    """Blocks 0 .. num_blocks - 1 with reference counts and content hashes. All in O(1).

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
        """All blocks are free, lowest first, and their content is forgotten."""
        self.free_blocks = OrderedDict.fromkeys(range(self.num_blocks))
        """Free blocks, longest free first; a dict, so that one can be taken from the middle."""
        self.ref_counts = [0] * self.num_blocks
        self.block_of: dict[bytes, int] = {}
        """Which block has the content with this hash."""
        self.hash_of: dict[int, bytes] = {}
        """The same the other way round: one entry here for each entry there."""
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

    # -- content: yours ----------------------------------------------------------------------

    def remember(self, block: int, block_hash: bytes) -> bool:
        """Make a used block findable, unless it is already, or another block has this content.

        Returns:
            Whether the block was the first of its content. Copies are not merged.
        """
        raise NotImplementedError("step 2: an entry in both dicts, or none.")

    def forget(self, block: int) -> None:
        """Make a findable block unfindable, be it in use or free."""
        raise NotImplementedError(
            "step 2: take it out of both dicts; a free one counted in num_cached_free."
        )

    # -- blocks go out and come back: yours --------------------------------------------------

    def free(self, block: int) -> None:
        """One table fewer holds the block; after the last it is free, its content kept."""
        raise NotImplementedError(
            "step 2: as in M3; self.free_blocks is an OrderedDict of which only the keys matter. "
            "If its content can be found, it counts in num_cached_free."
        )

    def allocate(self) -> int:
        """Take the block that has been free the longest; its content is forgotten.

        Event, if it had content: `KVEvent("evict", None, [block])`; `num_evictions` counts.
        """
        raise NotImplementedError(
            "step 2: popitem(last=False) gives the first key, and a value that nobody needs. "
            "Step 3: what could be found there is overwritten now, and must not be found."
        )

    def share(self, block: int) -> None:
        """One more table holds the block; a free one with content comes off the free list.

        Sharing a free block without content is a bug: AssertionError.
        """
        raise NotImplementedError(
            "step 3: a block in use is counted up, as in M3. A free one is deleted from "
            "self.free_blocks; it is not a cached *free* block any more."
        )

    # -- as it is ----------------------------------------------------------------------------

    def check_invariants(self) -> None:
        """Assert that hashes and blocks map one to one and cached free blocks are counted."""
        assert {block: h for h, block in self.block_of.items()} == self.hash_of, (
            f"block_of {self.block_of} and hash_of {self.hash_of} do not tell the same"
        )
        num_cached_free = sum(block in self.hash_of for block in self.free_blocks)
        assert num_cached_free == self.num_cached_free, (
            f"{num_cached_free} free blocks are findable, num_cached_free={self.num_cached_free}"
        )
