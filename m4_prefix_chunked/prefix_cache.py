"""Find the KV of a prompt's beginning by the names of its blocks: chained hashes.

    block 0             block 1                block 2
    tokens 0..15        tokens 16..31          tokens 32..47
    h0 = H(salt, t)  -> h1 = H(h0, t)       -> h2 = H(h1, t)

A hash covers all tokens before its block, too: equal hashes mean equal prefixes, and one lookup a
block finds the longest cached prefix. Only full blocks have a hash. The hash is cryptographic:
prompts come from users, and a collision would show one user what another wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

from m3_paged.block_manager import BlockManager
from milestone_llm.core.block_hashes import hash_block, hash_salt
from milestone_llm.core.request import Request

from .caching_pool import CachingBlockPool


@dataclass(frozen=True)
class PrefixHit:
    """The cached part of a request's known tokens."""

    blocks: list[int]
    num_tokens: int
    """Tokens that the blocks save. If all tokens are cached, the last one is still computed, since
    its logits are needed."""


class PrefixCache:
    """Finds blocks by content, and remembers the content of blocks that fill up.

    A block becomes findable when the step that completes it is *planned*: rows of the same step
    may share it, since every layer writes the keys and values of all rows before any row attends.

    Args:
        kv: the block tables; its pool is `pool`.
    """

    def __init__(self, kv: BlockManager, pool: CachingBlockPool, is_enabled: bool = True) -> None:
        self.kv = kv
        self.pool = pool
        self.is_enabled = is_enabled
        self.counts = dict.fromkeys(("queries", "hits", "queried_tokens", "saved_tokens"), 0)
        self.reset_requests()

    def reset_requests(self) -> None:
        """Forget all requests."""
        self.hashes: dict[str, list[bytes]] = {}
        """Per request, hashes of its full blocks as far as they were needed."""
        self.num_findable: dict[str, int] = {}
        """Per request with a block table, how many of its blocks have been made findable."""
        self.pending: set[int] = set()
        """Blocks that the step being planned completes: findable, but not yet written."""

    def begin_step(self) -> None:
        """Note that the blocks of the step before have been written."""
        self.pending.clear()

    def find(self, request: Request) -> PrefixHit:
        """Return the longest cached prefix of a request's known tokens."""
        blocks: list[int] = []
        if not self._is_asked(request):
            return PrefixHit(blocks, 0)
        num_known, size = len(request.token_ids), self.kv.block_size
        for index in range(num_known // size):
            block = self.pool.block_of.get(self._hash(request, index))
            if block is None:
                break
            blocks.append(block)
        num_tokens = len(blocks) * size
        if num_tokens == num_known:
            if blocks[-1] in self.pending:  # the copy precedes the forward that fills the block
                return PrefixHit(blocks[:-1], num_tokens - size)
            num_tokens -= 1
        return PrefixHit(blocks, num_tokens)

    def can_allocate(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a table for all known tokens fits, given what is cached of them."""
        num_new = self.kv.num_blocks_for(request.num_tokens) - len(hit.blocks)
        if hit.num_tokens < len(hit.blocks) * self.kv.block_size:  # writes into the last block
            num_new += self.pool.ref_counts[hit.blocks[-1]] > 0
        num_revived = sum(self.pool.ref_counts[block] == 0 for block in hit.blocks)
        return num_new + num_revived <= self.pool.num_free

    def allocate(self, request: Request, hit: PrefixHit) -> list[tuple[int, int]]:
        """Give a request a table for all known tokens that begins with the hit's blocks.

        Returns:
            Copies to make before the forward, as (from block, to block).
        """
        # A preempted request finds what it has computed itself: that is not part of the hit rate.
        if self._is_asked(request) and not request.num_preemptions:
            self.counts["queries"] += 1
            self.counts["hits"] += hit.num_tokens > 0
            self.counts["queried_tokens"] += request.num_tokens
            self.counts["saved_tokens"] += hit.num_tokens
        # Share the hit's blocks before any other block is allocated, which could evict them.
        self.kv.adopt(request.request_id, hit.blocks)
        self.num_findable[request.request_id] = len(hit.blocks)
        return self.kv.append(request.request_id, hit.num_tokens, request.num_tokens)

    def make_findable(self, request: Request, end: int) -> None:
        """Make findable the blocks that tokens `.. end - 1` fill, as far as the tokens are known.

        A block is found by its tokens. A block whose last token is still being sampled has to wait
        until the next call.
        """
        first = self.num_findable.get(request.request_id, 0)
        num_full = min(end, len(request.token_ids)) // self.kv.block_size
        if num_full <= first or not self.is_enabled:
            return
        table = self.kv.block_tables[request.request_id]
        for index in range(first, num_full):
            if self.pool.remember(table[index], self._hash(request, index)):
                self.pending.add(table[index])
        self.num_findable[request.request_id] = num_full

    def forget_blocks(self, request: Request) -> None:
        """Make the blocks of a request that went wrong unfindable; their owners keep them."""
        for block in self.kv.block_tables[request.request_id]:
            if block in self.pool.hash_of:
                self.pool.forget(block)

    def release(self, request: Request) -> None:
        """Let go of a request whose table goes away. Its blocks stay findable."""
        self.num_findable.pop(request.request_id, None)
        if request.is_finished:
            self.hashes.pop(request.request_id, None)

    def stats(self) -> dict[str, float]:
        """Return queries, hits, hit rate, tokens asked for and saved, all of requests that come for
        the first time, and the number of evicted blocks."""
        queried, saved = self.counts["queried_tokens"], self.counts["saved_tokens"]
        hit_rate = saved / queried if queried else 0.0
        return {**self.counts, "evictions": self.pool.num_evictions, "hit_rate": hit_rate}

    def _is_asked(self, request: Request) -> bool:
        """Whether to look for a prefix. Not if log-probabilities of prompt tokens are wanted, which
        need all logits. And not for a single token: the last token is always computed."""
        is_of_use = request.num_tokens > 1 and not request.lacks_prompt_logprobs
        return self.is_enabled and is_of_use

    def _hash(self, request: Request, index: int) -> bytes:
        """Return the hash of a request's full block. Each hash is computed once."""
        hashes = self.hashes.setdefault(request.request_id, [])
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else hash_salt(request.sampling_params.cache_salt)
            first = len(hashes) * self.kv.block_size
            tokens = request.token_ids[first : first + self.kv.block_size]
            hashes.append(hash_block(parent, tokens))
        return hashes[index]
