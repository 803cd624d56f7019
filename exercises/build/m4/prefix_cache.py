"""M4, written by you: finding the KV of a prompt's beginning by the names of its blocks.

    block 0             block 1                block 2
    tokens 0..15        tokens 16..31          tokens 32..47
    h0 = H(salt, t)  -> h1 = H(h0, t)       -> h2 = H(h1, t)

A hash covers all that came before: equal hashes mean equal prefixes, and one lookup a block finds
the longest cached one. Only full blocks have one. It is cryptographic: prompts come from users, and
a collision would show one what another wrote.

A block becomes findable when the step that completes it is *planned*: rows of the same step may
share it, since every layer writes the keys and values of all rows before any row attends.

Steps 1, 4 and 5: `python -m exercises.build m4`
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from exercises.build.m4.caching_pool import CachingBlockPool
from m3_paged.block_manager import BlockManager
from milestone_llm.core.request import Request


@dataclass(frozen=True)
class PrefixHit:
    """What is cached of a request's known tokens."""

    blocks: list[int]
    num_tokens: int
    """Tokens that the blocks save: all but one if everything is cached, since the last token's
    logits are wanted and so it is computed."""


class PrefixCache:
    """Finds blocks by content, and remembers the content of blocks that fill up.

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
        """No request is known any more."""
        self.hashes: dict[str, list[bytes]] = {}
        """Per request, hashes of its full blocks as far as they were needed."""
        self.num_findable: dict[str, int] = {}
        """Per request with a block table, how many of its blocks have been made findable."""
        self.pending: set[int] = set()
        """Blocks that the step being planned completes: findable, but not yet written."""

    def begin_step(self) -> None:
        """The blocks of the step before have been written."""
        self.pending.clear()

    # -- yours -------------------------------------------------------------------------------

    def make_findable(self, request: Request, end: int) -> None:
        """Make the blocks findable that tokens `.. end - 1` fill, as far as the tokens are known.

        A block is found by its tokens. `end` may be one more than `len(request.token_ids)`, while
        the last token is being sampled; its block has to wait until the next call.
        """
        if not self.is_enabled:
            return
        raise NotImplementedError(
            "step 4: from the first block that is not findable yet (self.num_findable, 0 if the "
            "request is not there) to the last full one: pool.remember(block, self._hash(request, "
            "index)). If it says True, the block is pending. Note in num_findable how far it is."
        )

    def find(self, request: Request) -> PrefixHit:
        """The longest cached prefix of a request's known tokens (`request.token_ids`)."""
        if not self._is_asked(request):
            return PrefixHit([], 0)
        raise NotImplementedError(
            "step 4: from block 0 on, as long as the hash of a full block is in pool.block_of. "
            "If everything is cached, the last token is computed nevertheless: the hit covers one "
            "token less, and its last block will be copied before it is written into. But a "
            "pending block cannot be copied yet: then the hit ends before it."
        )

    def can_allocate(self, request: Request, hit: PrefixHit) -> bool:
        """Whether a table for all known tokens fits, given what is cached of them.

        A hit without blocks may save tokens, too: they were swapped out, and come back.
        """
        raise NotImplementedError(
            "step 5: what must be free: a block for each that the hit does not have; one for each "
            "block of the hit that is free now, for it comes off the free list; and one for the "
            "copy, if the hit's last block is written into while others hold it."
        )

    def allocate(self, request: Request, hit: PrefixHit) -> list[tuple[int, int]]:
        """Give a request a table for all known tokens that begins with the hit's blocks.

        Returns:
            Copies to make before the forward, as (from block, to block).
        """
        if self._is_asked(request):
            self.counts["queries"] += 1
            self.counts["hits"] += hit.num_tokens > 0
            self.counts["queried_tokens"] += request.num_tokens
            self.counts["saved_tokens"] += hit.num_tokens
        raise NotImplementedError(
            "step 5: self.kv has two methods that do it: adopt(request_id, blocks) and "
            "append(request_id, start, end). Which must come first, so that no block of the hit is "
            "evicted? The hit's blocks are findable already: note that in num_findable."
        )

    # -- as it is ----------------------------------------------------------------------------

    def forget_blocks(self, request: Request) -> None:
        """The blocks of a request that went wrong must not be found; their owners keep them."""
        for block in self.kv.block_tables[request.request_id]:
            if block in self.pool.hash_of:
                self.pool.forget(block)

    def release(self, request: Request) -> None:
        """A request's table is about to go. Its blocks stay findable."""
        self.num_findable.pop(request.request_id, None)
        if request.is_finished:
            self.hashes.pop(request.request_id, None)

    def stats(self) -> dict[str, float]:
        """Queries, hits, hit rate, tokens asked for and saved, blocks evicted."""
        queried, saved = self.counts["queried_tokens"], self.counts["saved_tokens"]
        hit_rate = saved / queried if queried else 0.0
        return {**self.counts, "evictions": self.pool.num_evictions, "hit_rate": hit_rate}

    def _is_asked(self, request: Request) -> bool:
        """Whether to look for a prefix: log-probabilities of prompt tokens need all logits, and the
        last token is always computed."""
        is_of_use = request.num_tokens > 1 and not request.lacks_prompt_logprobs
        return self.is_enabled and is_of_use

    def _hash(self, request: Request, index: int) -> bytes:
        """Hash of a request's full block; each is computed once."""
        hashes = self.hashes.setdefault(request.request_id, [])
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else hash_salt(request.sampling_params.cache_salt)
            first = len(hashes) * self.kv.block_size
            tokens = request.token_ids[first : first + self.kv.block_size]
            hashes.append(hash_block(parent, tokens))
        return hashes[index]


def hash_salt(cache_salt: str) -> bytes:
    """The parent of a first block: prompts with different salts have no block in common."""
    return hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """SHA-256 of a full block's tokens and of all blocks before it.

    Args:
        parent: the hash of the block before, or that of the salt.
    """
    raise NotImplementedError(
        'step 1: array("q", token_ids).tobytes() makes bytes of tokens, hashlib.sha256(...) and '
        "its digest() a hash of bytes. Both must be in it, the parent and the tokens."
    )
