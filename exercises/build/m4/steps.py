"""The steps of M4's course: names of blocks, the pool that remembers, the cache, the scheduler."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from exercises.build.check import Parts, Wrong, step
from exercises.build.device import Ask
from exercises.build.final import check_engine, check_random_traffic
from exercises.build.session import complains, session
from exercises.build.skeleton import File, Todo
from exercises.build.traffic import play
from m4_prefix_chunked import EngineConfig
from m4_prefix_chunked.prefix_cache import PrefixHit
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.request import Request

MILESTONE = "m4_prefix_chunked"
TITLE = "prefix caching and chunked prefill (2 to 3 hours)"
DONE = """All of it. Now let it serve, beside ours:

  python -m m4_prefix_chunked.demo --scheduler exercises/build/m4/scheduler.py
  python -m m4_prefix_chunked.bench --set scheduler=exercises/build/m4/scheduler.py
  python -m m4_prefix_chunked.serve --scheduler exercises/build/m4/scheduler.py

M5 takes it, too. Ours are prefix_cache.py, caching_pool.py, kv_cache_manager.py and scheduler.py
in m4_prefix_chunked/, and milestone_llm/core/block_hashes.py."""
FILES = [
    File(
        "milestone_llm/core/block_hashes.py",
        {
            "hash_block": 'step 1: array("q", token_ids).tobytes() makes bytes of tokens, '
            "hashlib.sha256(...) and its digest() a hash of bytes. Both must be in it, the parent "
            "(the hash of the block before, or of the salt) and the tokens.",
        },
        "Begin here: `python -m exercises.build m4`",
    ),
    File(
        "m4_prefix_chunked/caching_pool.py",
        {
            "CachingBlockPool.allocate": "step 2: as in M3; popitem(last=False) gives the first "
            "key of self.free_blocks, and a value that nobody needs. Step 3: what could be found "
            'there is overwritten now, and must not be found. Event then: KVEvent("evict", None, '
            "[block]); num_evictions counts it.",
            "CachingBlockPool.share": "step 3: a block in use is counted up, as in M3. A free one "
            "is deleted from self.free_blocks; it is not a cached *free* block any more. Only a "
            "bug shares a free block without content: assert that.",
            "CachingBlockPool.free": "step 2: as in M3; self.free_blocks is an OrderedDict of "
            "which only the keys matter. If its content can be found, it counts in "
            "num_cached_free. Step 3: if not, and others' can (self.hash_of is not empty), it is "
            "given out next: move_to_end(block, last=False).",
            "CachingBlockPool.remember": "step 2: an entry in both dicts, or none. A block keeps "
            "the first name it got.",
            "CachingBlockPool.forget": "step 2: take it out of both dicts; a free one counted in "
            "num_cached_free.",
        },
        "Steps 2 and 3.",
    ),
    File(
        "m4_prefix_chunked/prefix_cache.py",
        {
            "PrefixCache.find": Todo(
                "step 4: from block 0 on, as long as the hash of a full block is in pool.block_of. "
                "If everything is cached, the last token is computed nevertheless: the hit covers "
                "one token less, and its last block will be copied before it is written into. But "
                "a pending block cannot be copied yet: then the hit ends before it.",
                first=2,
            ),
            "PrefixCache.can_allocate": "step 5: what must be free: a block for each that the hit "
            "does not have; one for each block of the hit that is free now, for it comes off the "
            "free list; and one for the copy, if the hit's last block is written into while others "
            "hold it. A hit without blocks may save tokens, too: they were swapped out, and come "
            "back.",
            "PrefixCache.allocate": Todo(
                "step 5: self.kv has two methods that do it: adopt(request_id, blocks) and "
                "append(request_id, start, end). Which must come first, so that no block of the "
                "hit is evicted? The hit's blocks are findable already: note that in num_findable.",
                first=1,
            ),
            "PrefixCache.make_findable": "step 4: nothing, unless self.is_enabled. From the first "
            "block that is not findable yet (self.num_findable, 0 if the request is not there) to "
            "the last full one: pool.remember(block, self._hash(request, index)). If it says True, "
            "the block is pending. Note in num_findable how far it is. `end` may be one more than "
            "len(request.token_ids), while the last token is being sampled.",
        },
        "Steps 4 and 5. `_hash` gives the name of a full block.",
    ),
    File(
        "m4_prefix_chunked/kv_cache_manager.py",
        {
            "KVCacheManager.allocate": Todo(
                "step 6: what was swapped out gets blocks and comes back as in M3, and 0 is "
                "returned. All others get their table from self.prefix_cache, which allocates, "
                "given the hit; what that returns belongs into plan.copies. Step 8: what the hit "
                "saves is computed already, which the request must know (num_computed_tokens), "
                "and is returned. Of a new request it is its num_cached_tokens, too.",
                first=1,
            ),
            "KVCacheManager.free": "step 6: as in M3; and self.prefix_cache.release(request), "
            "whether it has a table or not. Step 8: before a table is freed, make findable what is "
            'computed; but if its finish_reason is "error", forget its blocks instead, and what '
            "was found last (self._found).",
        },
        """Steps 6 to 8, together with scheduler.py: `scheduler.kv` is this `KVCacheManager`. Block
tables and preemption are M3's, or yours: change the imports.""",
    ),
    File(
        "m4_prefix_chunked/scheduler.py",
        {
            "Scheduler.schedule": Todo(
                'step 6: only `_prefill`. Step 7: `_decode` before it (prefill_policy="mixed"), '
                "which says how much of the budget is left; and the other policy: with "
                '"prefill_first" a step with rows of prompts has no others.',
                first=2,
                last=3,
            ),
            "Scheduler._decode": "step 7: in the order of by_seniority, as long as the budget "
            "lasts: who runs (it may have been preempted meanwhile), decodes, and gets room, has a "
            "row. Return what is left of the budget.",
            "Scheduler._prefill": "step 6: first those of by_seniority whose prompt is under way, "
            "while the budget lasts; then the queue, as in M3: reason_to_wait, _admit, _add_row. "
            "Nobody is admitted in a step that preempted.",
            "Scheduler._add_row": Todo(
                "step 6: num_new_tokens is the least of what there is and what is allowed. With "
                "enable_chunked_prefill at most the budget, and at most "
                "long_prefill_token_threshold if that is not 0; without, all that are not "
                "computed.",
                last=2,
            ),
            "Scheduler.reason_to_wait": Todo(
                "step 6: in chunks, a budget of 1 token is enough to begin; else all tokens that "
                "need to be computed (self.kv.find says how many need not) must fit. Memory as in "
                "M3.",
                first=2,
            ),
            "Scheduler._admit": "step 6: as in M3, but without a row. What self.kv.allocate found "
            "in the cache is returned.",
        },
        """Steps 6 to 9.

A running request *decodes* if it lacks one token only and is not in `self.completions.further`
(no further completions of its prompt are still to begin); otherwise its prompt is *under way*: it
has a row, and blocks for all of its prompt, since it was admitted.""",
    ),
]


# --- names and the pool -------------------------------------------------------------------------


@step("names of blocks", "block_hashes.py")
def names(parts: Parts) -> None:
    """Write `hash_block`: the name of a full block."""
    session(
        """
        >>> name = hash_block(b"parent", [1, 2, 3, 4])
        >>> (type(name), len(name))  # a SHA-256 digest.
        (bytes, 32)
        >>> hash_block(b"parent", [1, 2, 3, 4]) == name  # it is the same block.
        True
        >>> others = [1, 2, 3, 5], [4, 3, 2, 1], [12, 3, 4], [1, 2, 34], [257, 2, 3, 4]
        >>> [tokens for tokens in others if hash_block(b"parent", tokens) == name]  # other tokens
        ... # have another name.
        []
        >>> hash_block(b"another", [1, 2, 3, 4]) == name  # The same tokens after another parent.
        ... # Keys and values depend on all tokens before: with the same hash this block would be
        ... # found, and the answer would be to another prompt.
        False
        """,
        hash_block=parts.hash_block,
    )


@step("a pool that remembers", "caching_pool.py")
def pool_remembers(parts: Parts) -> None:
    """Write `remember`, `forget`, `free`, and `allocate` as far as M3's pool has it. A block
    that is freed keeps its content."""
    session(
        """
        >>> pool = CachingBlockPool(3, events=[])
        >>> [pool.allocate(), pool.allocate()]  # longest free first, as in M3.
        [0, 1]
        >>> pool.remember(0, b"h")  # block 0 is the first with this content.
        True
        >>> (pool.block_of, pool.hash_of)  # both tell.
        ({b"h": 0}, {0: b"h"})
        >>> pool.remember(1, b"h")  # block 0 has this content already.
        False
        >>> pool.block_of  # copies are not merged: the first one is found.
        {b"h": 0}
        >>> pool.free(0)
        >>> (pool.num_free, pool.num_cached_free, pool.block_of)  # block 0 is free, and what is in
        ... # it can still be found.
        (2, 1, {b"h": 0})
        >>> pool.check_invariants()
        >>> pool.forget(0)
        >>> (pool.num_cached_free, pool.block_of, pool.hash_of)  # block 0 stays free, and nothing
        ... # is found there any more.
        (0, {}, {})
        >>> pool.remember(1, b"h")  # block 0 has it no more.
        True
        >>> pool.forget(1)
        >>> pool.num_cached_free  # block 1 was in use: never cached and free.
        0
        """,
        CachingBlockPool=parts.CachingBlockPool,
    )


class Unsearched(OrderedDict[Any, Any]):
    """A dict that nobody may walk through, at whatever length."""

    def _search(self) -> Any:
        raise Wrong(
            "The pool looks through its blocks. That takes the longer the larger it is, at every "
            "token: ask the dicts for a key, and the free blocks for their first (popitem)."
        )

    __iter__ = __reversed__ = keys = values = items = _search


@step("eviction, and a hit on a free block", "caching_pool.py")
def pool_evicts(parts: Parts) -> None:
    """`allocate` takes the first free block: one in which nothing can be found, or the one that
    has been free the longest; if it has content, that is evicted. Write `share`: a free block that
    is found comes off the free list. Freeing a free block, or sharing one in which nothing is
    found, is a bug, and is asserted."""
    session(
        """
        >>> pool = CachingBlockPool(4, events=[])
        >>> for name in (b"h0", b"h1", b"h2"): pool.remember(pool.allocate(), name)
        >>> pool.allocate()
        3
        >>> pool.free(1)
        >>> pool.free(0)
        >>> pool.free(3)
        >>> list(pool.free_blocks)  # nothing can be found in 3: it is given out before others are
        ... # evicted. Then longest free first; 2 is in use.
        [3, 1, 0]
        >>> pool.allocate()
        3
        >>> (pool.num_evictions, pool.events)  # there was nothing in block 3.
        (0, [])
        >>> pool.allocate()  # 1 came back before 0; 2 is in use.
        1
        >>> pool.block_of  # block 1 will be overwritten: whoever found its old content would read
        ... # another's.
        {b"h0": 0, b"h2": 2}
        >>> pool.num_cached_free  # block 0 is free and can be found; block 1, which counted, is not
        ... # free any more.
        1
        >>> [(event.type, event.blocks) for event in pool.events]  # the trace shows what the cache
        ... # lost.
        [("evict", [1])]
        >>> pool.num_evictions  # one content was lost.
        1
        >>> pool.share(0)
        >>> (list(pool.free_blocks), pool.ref_counts[0], pool.num_cached_free)  # a request found
        ... # block 0, which was free: it is in use again, and must not be given to anybody.
        ([], 1, 0)
        >>> pool.share(0)
        >>> pool.ref_counts[0]  # two tables hold it.
        2
        >>> pool.check_invariants()
        >>> pool.free(3)
        >>> (complains(pool.free, 3), complains(pool.share, 3))  # nobody holds block 3, and nothing
        ... # is found there. Only a bug frees or shares it, and would give a block to two requests
        ... # much later: assert it.
        (True, True)
        >>> pool.free_blocks = Unsearched(pool.free_blocks)
        >>> pool.block_of, pool.hash_of = Unsearched(pool.block_of), Unsearched(pool.hash_of)
        >>> pool.share(2)
        >>> for block in (2, 0, 0): pool.free(block)
        >>> pool.share(0)
        >>> pool.remember(pool.allocate(), b"h3")  # a new name in a block that had none.
        True
        """,
        CachingBlockPool=parts.CachingBlockPool,
        Unsearched=Unsearched,
        complains=complains,
    )


# --- the cache ----------------------------------------------------------------------------------


def cached(parts: Parts, text: str) -> None:
    """A session with a prefix cache of the reader's over tables and a pool that are right."""
    from m3_paged.block_manager import BlockManager
    from m4_prefix_chunked.caching_pool import CachingBlockPool

    def cache_of(num_blocks: int) -> Any:
        pool = CachingBlockPool(num_blocks, [])
        return parts.PrefixCache(BlockManager(pool, 4, pool.events), pool)

    def request(name: str, prompt: str, num_own: int, salt: str = "") -> Request:
        return Ask(name, num_own, 8, prompt=prompt, salt=salt).requests(0, 4)[0]

    def found(cache: Any, *asked: Any) -> tuple[list[int], int]:
        hit = cache.find(request("x", *asked))
        cache.hashes.pop("x", None)
        return hit.blocks, hit.num_tokens

    def can_allocate(cache: Any, *asked: Any) -> bool:
        own = request("x", *asked)
        hit = cache.find(own)
        cache.hashes.pop("x", None)
        return bool(cache.can_allocate(own, hit))

    names = {"cache_of": cache_of, "request": request, "found": found, "can_allocate": can_allocate}
    session(text, **names, PrefixHit=PrefixHit, SampledToken=SampledToken)


@step("a hit", "prefix_cache.py")
def hit(parts: Parts) -> None:
    """Write `make_findable` and `find`: full blocks are found by their names, one after the
    other from the beginning of a prompt."""
    cached(
        parts,
        """
        >>> cache = cache_of(num_blocks=6)
        >>> a = request("a", "AB", 3)  # a prompt of block A, block B and 3 tokens; 4 are a block.
        >>> cache.kv.allocate("a", 12)
        >>> cache.make_findable(a, 6)
        >>> sorted(cache.pool.hash_of)  # 6 tokens fill block 0 alone. A block that is not full is
        ... # not findable: more would come.
        [0]
        >>> cache.begin_step()
        >>> cache.make_findable(a, 11)
        >>> sorted(cache.pool.hash_of)  # two blocks are full.
        [0, 1]
        >>> cache.pending  # block 1 is completed by the step that is being planned.
        {1}
        >>> a.num_in_flight = 1
        >>> cache.make_findable(a, 12)
        >>> sorted(cache.pool.hash_of)  # token 11 is being sampled. Block 2 is named by its tokens,
        ... # of which the last is not known yet.
        [0, 1]
        >>> found(cache, "AB", 0)  # all is cached, and the last token is computed nevertheless. It
        ... # would be written into a copy of block 1, which is pending: not written itself.
        ([0], 4)
        >>> cache.begin_step()
        >>> found(cache, "AB", 2)  # both blocks are cached, 2 tokens are not.
        ([0, 1], 8)
        >>> found(cache, "AC", 2)  # A is cached, C is not.
        ([0], 4)
        >>> found(cache, "BA", 2)  # B was cached after A. At the beginning it is another block.
        ([], 0)
        >>> found(cache, "CB", 2)  # B is cached after A, not after C.
        ([], 0)
        >>> found(cache, "", 3)  # no block is full.
        ([], 0)
        >>> found(cache, "AB", 0)  # the last token is computed whatever is cached: its logits give
        ... # the next one. The hit saves at most all but one.
        ([0, 1], 7)
        >>> found(cache, "AB", 2, "another cache_salt")  # salts keep tenants apart.
        ([], 0)
        >>> a.append_token(SampledToken(7))
        >>> cache.make_findable(a, 12)
        >>> sorted(cache.pool.hash_of)  # token 11 is known. Blocks that fill while decoding are
        ... # cached, too.
        [0, 1, 2]
        """,
    )


@step("a table that begins with a hit", "prefix_cache.py")
def table_with_a_hit(parts: Parts) -> None:
    """Write `can_allocate` and `allocate`. Blocks of the hit that are free are not free for
    others."""
    cached(
        parts,
        """
        >>> cache = cache_of(num_blocks=4)
        >>> a = request("a", "AB", 1)  # a prompt of block A, block B and 1 token
        >>> cache.kv.allocate("a", 9)
        >>> cache.make_findable(a, 9)
        >>> cache.begin_step()
        >>> can_allocate(cache, "AB", 2)  # 3 blocks, 2 of them shared with a: 1 is lacking, 1 is
        ... # free.
        True
        >>> can_allocate(cache, "AB", 5)  # 2 are lacking, 1 is free.
        False
        >>> can_allocate(cache, "AB", 0)  # 1 for the copy of block 1; 1 is free.
        True
        >>> cache.can_allocate(request("x", "", 4), PrefixHit([], 3))  # 3 tokens were swapped out
        ... # and come back without blocks: 1 block is needed, and 1 is free.
        True
        >>> cache.kv.allocate("z", 4)
        >>> can_allocate(cache, "AB", 0)  # no block is free. Its last token is written into block
        ... # 1, which a holds: the copy needs a free block.
        False
        >>> cache.kv.free("z")
        >>> cache.kv.free("a")
        >>> cache.release(a)
        >>> len(cache.hashes.get("a", []))  # a is preempted, comes back, and asks again for the
        ... # names of its blocks: each block is hashed once.
        2
        >>> can_allocate(cache, "AB", 8)  # nobody has blocks any more; 4 in all.
        True
        >>> can_allocate(cache, "AB", 9)  # 3 blocks are lacking and 4 are free, but two of these
        ... # are the hit's own: they come off the free list.
        False
        >>> b = request("b", "AB", 2)
        >>> cache.allocate(b, cache.find(b))  # nothing is shared: nothing to copy.
        []
        >>> cache.kv.block_tables.get("b")  # it begins with the blocks that were found. They are
        ... # taken before a new one is: that could be one of them.
        [0, 1, 2]
        >>> cache.num_findable.get("b")  # two of its blocks are findable.
        2
        >>> c = request("c", "AB", 0)
        >>> cache.allocate(c, cache.find(c))  # token 7 is computed again, and is written into a
        ... # copy of block 1, which b holds.
        [(1, 3)]
        >>> cache.kv.block_tables.get("c")  # block 0 is shared.
        [0, 3]
        >>> cache.kv.free("b")
        >>> cache.release(b)
        >>> cache.kv.allocate("z", 4)
        >>> can_allocate(cache, "AB", 0)  # block 1 alone is free. It is the hit's own, and nobody
        ... # holds it: its last token is written there, without a copy.
        True
        >>> cache.kv.check_invariants()
        """,
    )


# --- the scheduler ------------------------------------------------------------------------------


def scheduler(parts: Parts, num_blocks: int, **fields: Any) -> Any:
    """A scheduler of the reader's: blocks of 4, 8 tokens a step, no caching if not asked for."""
    defaults = {"max_num_seqs": 4, "block_size": 4, "max_num_batched_tokens": 8}
    config = EngineConfig(**{**defaults, "enable_prefix_caching": False, **fields})
    return parts.Scheduler(config, 16, num_blocks)


@step("chunks", "scheduler.py")
def chunks(parts: Parts) -> None:
    """Prompts alone, without caching: write `schedule` with `_prefill`, `_add_row`,
    `reason_to_wait`, `_admit` and `free_memory`. A prompt gets as many tokens of a step as
    are left, and goes on in the next."""
    play(
        scheduler(parts, 8),
        """
        comes a(12, 1) b(6, 1) c(3, 1)
        a[0:8] +a, b waits               # 8 tokens are the whole step: b waits.
        a[8:12] b[0:4] +b                # a's last 4 tokens; b begins with the 4 that are left.
        b[4:6] c[0:3] +c                 # the prompt under way comes before the one that waits.
        """,
    )
    play(
        scheduler(parts, 8, long_prefill_token_threshold=5),
        """
        comes a(12, 1) b(6, 1) c(3, 1)
        a[0:5] b[0:3] +a +b              # a row has at most 5 tokens: b gets what a must leave.
        a[5:10] b[3:6], c waits          # the same again.
        a[10:12] c[0:3] +c               # a and c fit whole.
        """,
    )
    play(
        scheduler(parts, 8, enable_chunked_prefill=False, max_num_batched_tokens=16),
        """
        comes a(12, 1) b(6, 1) c(3, 1)
        a[0:12] +a, b waits              # 4 tokens are left; b's 6 come whole or not at all.
        b[0:6] c[0:3] +b +c
        """,
    )
    play(
        scheduler(parts, 4),
        """
        comes a(6, 1) b(10, 1)
        a[0:6] +a, b waits               # b could begin with 2 tokens; its 3 blocks are not free.
        b[0:8] +b                        # a request has blocks for its whole prompt when it is
                                         # admitted.
        b[8:10]
        """,
    )


@step("decode rows beside chunks", "scheduler.py")
def decode(parts: Parts) -> None:
    """Write `_decode`, and both policies in `schedule`: decode rows first, so that no long
    prompt makes them wait ("mixed"), or prompts first ("prefill_first")."""
    play(
        scheduler(parts, 8),
        """
        comes a(2, 5) b(2, 5)
        a[0:2] b[0:2] +a +b
        comes p(11, 2)
        a[2:3] b[2:3] p[0:6] +p    # two decode rows leave 6 of 8 tokens for p's prompt.
        a[3:4] b[3:4] p[6:11]      # p's chunk is its last and samples; a and b stand first.
        a[4:5] b[4:5] p[11:12]     # p decodes.
        a[5:6] b[5:6]
        """,
    )
    play(
        scheduler(parts, 8, prefill_policy="prefill_first"),
        """
        comes a(2, 3) b(2, 3)
        a[0:2] b[0:2] +a +b
        comes p(11, 2)
        p[0:8] +p                  # a step with rows of prompts has no others: a, b stand still.
        p[8:11]                    # p's prompt is still under way.
        a[2:3] b[2:3] p[11:12]     # no prompt is left: all decode.
        a[3:4] b[3:4]
        """,
    )
    play(
        scheduler(parts, 8, max_num_batched_tokens=2),
        """
        comes a(1, 2) b(1, 2) c(1, 2)
        a[0:1] b[0:1] +a +b
        a[1:2] b[1:2]              # with chunks a budget may be below max_num_seqs: c waits.
        c[0:1] +c
        c[1:2]
        """,
    )
    play(
        scheduler(parts, 4),
        """
        comes a(4, 3) b(3, 3) c(4, 2)
        a[0:4] b[0:3] c[0:1] +a +b +c  # c's first chunk is 1 token.
        a[4:5] b[3:4] c[1:4]           # a takes the last block.
        a[5:6] b[4:5] -c               # b needs a block: c, the newest, goes. c has no row.
        c[0:5] ^c                      # its prompt and the token that it had, computed again.
        """,
    )
    play(
        scheduler(parts, 4, policy="priority", max_num_batched_tokens=16),
        """
        comes high(4, 4) low(9, 2, priority=5)
        high[0:4] low[0:9] +high +low  # all 4 blocks are taken.
        comes mid(1, 1, priority=2)
        high[4:5] -low                 # mid would fit, but nobody is admitted in a step that
                                       # preempts.
        high[5:6] mid[0:1] +mid
        ...
        """,
    )
    play(
        scheduler(parts, 8),
        """
        comes a(9, 2, n=2)
        a[0:8] +a
        a[8:9] +a/1              # a lacks one token only, but its second completion has not begun:
            # it is a prompt under way. a/1 begins with what this row samples, and has no row yet.
        a[9:10] a/1[9:10]        # both completions decode.
        """,
    )


@step("hits in the scheduler", "kv_cache_manager.py")
def hits(parts: Parts) -> None:
    """In `allocate` of the KV manager, what the cache found counts as computed. In `free`, what a
    request has computed stays findable, unless it ended with an error."""

    def make(num_blocks: int = 16, **fields: Any) -> Any:
        fields = {"enable_prefix_caching": True, "max_num_batched_tokens": 32, **fields}
        return scheduler(parts, num_blocks, **fields)

    play(
        make(),
        """
        comes a(AB+2, 2)
        a[0:10] +a                       # nothing is cached yet.
        comes b(AB+3, 2) c(AC+1, 2) d(BA+1, 1)
        a[10:11] b[8:11] c[4:9] d[0:9] +b +c +d  # b begins with A B: 8 tokens are computed already.
            # c shares A alone, and d nothing: B at its beginning is not B after A.
        b[11:12] c[9:10]
        """,
    )
    play(
        make(),
        """
        comes a(AB+1, 1) b(AB+2, 1)
        a[0:9] b[8:10] +a +b             # two come in one step: still only one pays.
        nothing
        comes c(AB, 1)
        c[7:8] +c                        # a and b have gone, and their blocks have their content
            # still. All of c's prompt is cached; its last token is computed.
        """,
    )
    play(
        make(enable_chunked_prefill=False, max_num_batched_tokens=16),
        """
        comes a(AB+5, 1) b(AB+2, 1)
        a[0:13] b[8:10] +a +b            # prompts come whole here. a leaves 3 tokens; of b's 10 the
                                         # hit saves 8: 2 are new.
        """,
    )
    play(
        make(4),
        """
        comes a(A+1, 1)
        a[0:5] +a
        comes b(14, 2)
        b[0:14] +b                       # b's prompt takes all 4 blocks: what a left is evicted.
        b[14:15]
        comes c(A+1, 1)
        c[0:5] +c                        # A is no longer cached.
        """,
    )
    play(
        make(),
        """
        comes a(AB+1, 9)
        a[0:9] +a
        then a ends with an error
        comes b(AB+2, 1)
        b[0:10] +b                       # a ended with "error": what is in its blocks may be wrong,
                                         # and must not be found.
        """,
        lambda own, requests: own.finish(requests["a"], "error"),
    )
    own = make()
    play(
        own,
        """
        comes a(3, 3)
        a[0:3] +a
        a[3:4]
        a[4:5]
        """,
    )
    session(
        """
        >>> len(pool.hash_of)  # a had 3 tokens and generated 3, of which 5 were computed; it has
        ... # gone. Tokens 0 to 3 fill a block. It filled while a decoded: that is cached, too.
        1
        """,
        pool=own.kv.pool,
    )


@step("random traffic", "scheduler.py")
def random_traffic(parts: Parts) -> None:
    """Nothing new to write: the same decisions as M4's scheduler, whatever comes."""

    def make(kind: Any, rng: Any) -> Any:
        block_size = rng.choice((1, 2, 4))
        config = EngineConfig(
            max_num_seqs=rng.randint(3, 5),
            max_num_batched_tokens=rng.randint(4, 24),
            policy=rng.choice(("fcfs", "priority")),
            preemption=rng.choice(("recompute", "swap")),
            prefill_policy=rng.choice(("mixed", "prefill_first")),
            long_prefill_token_threshold=rng.choice((0, 3)),
            block_size=block_size,
        )
        return kind(config, 24, rng.randint(24, 40) // block_size)

    def ask(name: str, rng: Any) -> Ask:
        prompt, n = rng.choice(("", "A", "AB", "ABA", "B")), rng.choice((1, 1, 1, 3))
        num_own, max_tokens = rng.randint(0 if prompt else 1, 5), rng.randint(1, 7)
        return Ask(name, num_own, max_tokens, rng.randint(0, 2), n, prompt)

    check_random_traffic(make, MILESTONE, parts, ask)


@step("your engine serves a model", "scheduler.py", needs_model=True)
def serves(parts: Parts) -> None:
    """Nothing new to write: an engine with your parts gives the same tokens as M4."""
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "kv_cache_tokens": 64}
    check_engine(MILESTONE, parts, block_size=4, **limits)
