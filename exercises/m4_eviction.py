"""M4: design which cached block is evicted when a new one is needed.

The pool gives out the block that has been free the longest, and forgets its content: least recently
used (LRU). That is right for most traffic. But long documents that are asked about once spoil it.
Each fills the pool with blocks that no later request needs, and evicts the system prompt with which
every third request begins, because that was last used a few documents ago.

Design a pool that keeps the useful blocks. Two conditions:

1. Documents that come once do no harm: of the system prompts' tokens, the cache saves at least ten
   percentage points more than with LRU.
2. Popularity fades. After a while another system prompt is in use, then another. A prompt that was
   popular once must not hold its blocks for ever: with the last prompts the cache must still save
   as much as LRU does, or more.

What the pool is told (m4_prefix_chunked/caching_pool.py): `share(block)` is called when a request
finds a block in the cache, `free(block)` when one gives it back, `remember(block, hash)` when a
block is full and can be found, `forget(block)` when its content is dropped. `free_blocks` has the
free ones, longest free first. A request gives its last block back first, so that the beginning of a
prompt stays longest: a block cannot be found when one before it is gone.

To serve with it, copy it to m4_prefix_chunked/ and use it in scheduler.py for `CachingBlockPool`.

    python -m pytest tests/exercises/test_m4_eviction.py
"""

from __future__ import annotations

from m4_prefix_chunked.caching_pool import CachingBlockPool


class EvictingPool(CachingBlockPool):
    """A caching pool that chooses which free block is given out next."""

    def allocate(self) -> int:
        """Take a free block; its cached content is forgotten.

        Hint: `super().allocate()` takes the first of `self.free_blocks`; bring the block that you
        choose there (`self.free_blocks.move_to_end(block, last=False)`). What you record about
        blocks begins in `reset`, which the constructor calls. First ask whether a block was ever
        found in the cache. And then: when was that?
        """
        raise NotImplementedError
