"""Finding the KV of a prompt's beginning: block hashes, each chained to the one before.

    block 0             block 1                block 2
    tokens 0..15        tokens 16..31          tokens 32..47
    h0 = H(salt, t)  -> h1 = H(h0, t)       -> h2 = H(h1, t)

Because a hash covers all that came before, equal hashes mean equal prefixes, and one lookup a block
finds the longest cached one. Only full blocks have a hash. The hash is cryptographic: prompts come
from users, and a collision would show one user what another wrote.
"""

from __future__ import annotations

import hashlib
from array import array

from m3_paged.block_manager import BlockManager
from milestone_llm.engine.request import Request
from milestone_llm.trace.tracer import KVEvent

from .caching_pool import CachingBlockPool


def hash_block(parent: bytes, token_ids: list[int]) -> bytes:
    """SHA-256 of a full block's tokens and of all blocks before it."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


class PrefixCache(BlockManager):
    """Block tables over a pool that remembers content.

    A block becomes findable when the step that completes it is *planned*: rows of the same step
    may share it, since every layer writes the keys and values of all rows before any row attends.
    """

    pool: CachingBlockPool

    def __init__(self, num_blocks: int, block_size: int, is_enabled: bool = True) -> None:
        super().__init__(num_blocks, block_size)
        self.pool = CachingBlockPool(num_blocks)
        self.is_enabled = is_enabled
        self.hashes: dict[str, list[bytes]] = {}
        """Per request, hashes of its full blocks as far as they were needed."""
        self.pending: set[int] = set()
        """Blocks that the step being planned completes: findable, but not yet written."""
        self.rewritten: set[int] = set()
        """Findable blocks whose last token the step being planned computes again, in place."""
        self.counts = dict.fromkeys(
            ("queries", "hits", "queried_tokens", "saved_tokens", "evictions"), 0
        )

    def begin_step(self) -> None:
        """The blocks of the step before have been written."""
        self.pending.clear()
        self.rewritten.clear()

    def find_prefix(self, request: Request) -> tuple[list[int], int]:
        """The longest cached prefix of a request's known tokens.

        Returns:
            Its blocks, and the tokens that they save: all but one if everything is cached, since
            the last token's logits are wanted and so it is computed.
        """
        blocks: list[int] = []
        if not self.is_enabled:
            return blocks, 0
        for index in range(request.num_tokens // self.block_size):
            block = self.pool.block_of.get(self._hash(request, index))
            if block is None:
                break
            blocks.append(block)
        num_cached = len(blocks) * self.block_size
        if num_cached == request.num_tokens:
            if blocks[-1] in self.pending:  # it must be copied before this step's forward: too soon
                return blocks[:-1], num_cached - self.block_size
            num_cached -= 1
        return blocks, num_cached

    def can_allocate_with_prefix(self, request: Request) -> bool:
        """Whether a table for all known tokens fits, given what is cached of them."""
        blocks, num_cached = self.find_prefix(request)
        num_new = self.num_blocks_for(request.num_tokens) - len(blocks)
        if num_cached < len(blocks) * self.block_size:  # the last block will be written into
            num_new += self.pool.ref_counts[blocks[-1]] > 0
        num_revived = sum(self.pool.ref_counts[block] == 0 for block in blocks)
        return num_new + num_revived <= self.pool.num_free

    def allocate_with_prefix(self, request: Request) -> tuple[int, list[tuple[int, int]]]:
        """Give a request a table for all known tokens that begins with what is cached of them.

        Returns:
            Tokens saved, and copies to make before the forward, as (from block, to block).
        """
        blocks, num_cached = self.find_prefix(request)
        self.counts["queries"] += self.is_enabled
        self.counts["hits"] += num_cached > 0
        self.counts["queried_tokens"] += request.num_tokens * self.is_enabled
        self.counts["saved_tokens"] += num_cached
        for block in blocks:  # before anything is allocated, which could evict them
            self.pool.share(block)
        self.owners[request.request_id] = list(blocks)
        if blocks:
            self.events.append(KVEvent("share", request.request_id, list(blocks)))
        copies = self.append(request.request_id, num_cached, request.num_tokens)
        if num_cached < len(blocks) * self.block_size and not copies:
            self.rewritten.add(blocks[-1])
        return num_cached, copies

    def cache_full_blocks(self, request: Request, start: int, end: int) -> None:
        """Make the blocks findable that a row computing tokens `start .. end - 1` completes."""
        if not self.is_enabled:
            return
        table = self.owners[request.request_id]
        for index in range(start // self.block_size, end // self.block_size):
            if self.pool.remember(table[index], self._hash(request, index)):
                self.pending.add(table[index])

    def forget_pending(self) -> None:
        """The step that was to write these blocks failed."""
        self.forget_blocks(self.pending | self.rewritten)
        self.begin_step()

    def forget_blocks(self, blocks: set[int]) -> None:
        """Nobody is to find these blocks; their owners keep them."""
        for block in blocks & self.pool.hash_of.keys():
            self.pool.forget(block)

    def forget_request(self, request_id: str) -> None:
        """A request is finished: drop its hashes (not its blocks, which others may find)."""
        self.hashes.pop(request_id, None)

    def reset(self) -> bool:
        """Forget all cached content. Refused (False) while any block is in use."""
        if self.pool.num_used:
            return False
        self.pool.forget_all()
        return True

    def _hash(self, request: Request, index: int) -> bytes:
        """Hash of a request's full block; each is computed once."""
        hashes = self.hashes.setdefault(request.request_id, [])
        while len(hashes) <= index:
            salt = request.sampling_params.cache_salt.encode("utf-8", "surrogatepass")
            parent = hashes[-1] if hashes else hashlib.sha256(salt).digest()
            first = len(hashes) * self.block_size
            hashes.append(hash_block(parent, request.token_ids[first : first + self.block_size]))
        return hashes[index]

    def take_evictions(self) -> list[int]:
        """Blocks whose content was given up since the last call."""
        evicted, self.pool.evicted = self.pool.evicted, []
        self.counts["evictions"] += len(evicted)
        return evicted

    def check_invariants(self) -> None:
        """Assert also that hashes and blocks map one to one and cached free blocks are counted."""
        super().check_invariants()
        pool = self.pool
        assert {block: h for h, block in pool.block_of.items()} == pool.hash_of
        num_cached_free = sum(block in pool.hash_of for block in pool.free_blocks)
        assert num_cached_free == pool.num_cached_free, "cached free blocks miscounted"
