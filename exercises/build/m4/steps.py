"""The steps of M4's course: names of blocks, the pool that remembers, the cache, the scheduler."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from exercises.build.check import Parts, Step, Wrong, expect
from exercises.build.device import Ask
from exercises.build.final import check_engine, check_random_traffic
from exercises.build.skeleton import File, Todo
from exercises.build.traffic import At, play
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

M5 takes it, too. Ours are prefix_cache.py, caching_pool.py and scheduler.py in
m4_prefix_chunked/, and milestone_llm/frontend/block_hashes.py."""
FILES = [
    File(
        "milestone_llm/frontend/block_hashes.py",
        """M4, written by you: the names of the blocks that a prompt fills.

    block 0             block 1                block 2
    tokens 0..15        tokens 16..31          tokens 32..47
    h0 = H(salt, t)  -> h1 = H(h0, t)       -> h2 = H(h1, t)

A hash covers all that came before: equal hashes mean equal prefixes. It is cryptographic: prompts
come from users, and a collision would show one what another wrote.

Begin here: `python -m exercises.build m4`""",
        {
            "hash_block": 'step 1: array("q", token_ids).tobytes() makes bytes of tokens, '
            "hashlib.sha256(...) and its digest() a hash of bytes. Both must be in it, the parent "
            "(the hash of the block before, or of the salt) and the tokens.",
        },
    ),
    File(
        "m4_prefix_chunked/caching_pool.py",
        """M4, written by you: a block pool whose free blocks keep their content until reused.

hash -> block                      free list, longest free first
h(a) -> 4   in use                 [7, 9, 2]     9 and 2 hold h(c) and h(b): still useful
h(b) -> 2   free, cached           allocate takes 7, then 9 (evicting h(c)), then 2
h(c) -> 9   free, cached           a hit on h(b) takes 2 off the list, from wherever it is

Steps 2 and 3: `python -m exercises.build m4`""",
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
            "num_cached_free.",
            "CachingBlockPool.remember": "step 2: an entry in both dicts, or none. A block keeps "
            "the first name it got.",
            "CachingBlockPool.forget": "step 2: take it out of both dicts; a free one counted in "
            "num_cached_free.",
        },
    ),
    File(
        "m4_prefix_chunked/prefix_cache.py",
        """M4, written by you: finding the KV of a prompt's beginning by the names of its blocks.

One lookup a block finds the longest cached prefix. Only full blocks have a name (block_hashes.py),
and `_hash` gives it.

Steps 4 and 5: `python -m exercises.build m4`""",
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
    ),
    File(
        "m4_prefix_chunked/scheduler.py",
        """M4, written by you: scheduling with a prefix cache and with prompts computed in chunks.

A step has a budget of tokens. Decode rows take one each, so that no running request waits for the
whole prompt of another; the rest goes to prompts in order, as large a chunk of each as fits. A
chunk that does not reach the last known token samples nothing.

    budget 8   | d d d | P P P P P |     three decode rows, five tokens of a prompt of twelve
    budget 8   | d d d | P P P P P |
    budget 8   | d d d | P P | Q Q Q |   its last two sample a token; the next prompt begins

Begin with block_hashes.py, caching_pool.py and prefix_cache.py; this file is steps 6 to 9. Block
tables and preemption are M3's (m3_paged/), or yours: change the imports.

A running request *decodes* if it lacks one token only and is not in `self.completions.forks` (no
further completions of its prompt are still to begin); otherwise its prompt is *under way*: it has a
row, and blocks for all of its prompt, since it was admitted.""",
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
                "the hit does not save must fit. Memory: self.prefix_cache.can_allocate.",
                first=4,
            ),
            "Scheduler._admit": "step 6: as in M3, but without a row, and what is not swapped out "
            "gets its table from self.prefix_cache, which finds a hit and allocates; what that "
            "returns belongs into plan.copies. Step 8: what the hit saves is computed already, "
            "which the request must know (num_computed_tokens), and is returned. Of a new request "
            "it is its num_cached_tokens, too.",
            "Scheduler.free_memory": "step 6: as in M3; and self.prefix_cache.release(request), "
            "whether it has a table or not. Step 8: before a table is freed, make findable what is "
            'computed; but if its finish_reason is "error", forget its blocks instead.',
        },
    ),
]


# --- names and the pool -------------------------------------------------------------------------


def check_names(parts: Parts) -> None:
    """A hash tells a block's tokens and all before it."""
    name = parts.hash_block(b"parent", [1, 2, 3, 4])
    if not isinstance(name, bytes) or len(name) != 32:
        raise Wrong(f"hash_block gives {name!r}; expected the 32 bytes of a SHA-256 digest.")
    if parts.hash_block(b"parent", [1, 2, 3, 4]) != name:
        raise Wrong("The same block has another hash when it is asked for again.")
    for tokens in ([1, 2, 3, 5], [4, 3, 2, 1], [12, 3, 4], [1, 2, 34], [257, 2, 3, 4]):
        if parts.hash_block(b"parent", tokens) == name:
            raise Wrong(f"Tokens [1, 2, 3, 4] and {tokens} have the same hash.")
    if parts.hash_block(b"another", [1, 2, 3, 4]) == name:
        raise Wrong(
            "The same tokens after another parent have the same hash. Keys and values depend on "
            "all tokens before: this block would be found, and the answer would be to another "
            "prompt."
        )


def check_pool_remembers(parts: Parts) -> None:
    """Content can be found while a block is in use and when it is free."""
    pool = parts.CachingBlockPool(3, [])
    expect(
        "allocate() twice",
        [pool.allocate(), pool.allocate()],
        [0, 1],
        "longest free first, as in M3.",
    )
    expect('remember(0, b"h")', pool.remember(0, b"h"), True, "block 0 is the first with h.")
    expect("block_of, hash_of", (pool.block_of, pool.hash_of), ({b"h": 0}, {0: b"h"}), "both tell.")
    expect('remember(1, b"h")', pool.remember(1, b"h"), False, "block 0 has this content already.")
    expect("block_of", pool.block_of, {b"h": 0}, "copies are not merged: the first one is found.")
    pool.free(0)
    expect(
        "free(0): num_free, num_cached_free, block_of",
        (pool.num_free, pool.num_cached_free, pool.block_of),
        (2, 1, {b"h": 0}),
        "block 0 is free, and what is in it can still be found.",
    )
    pool.check_invariants()
    pool.forget(0)
    expect(
        "forget(0): num_cached_free, block_of, hash_of",
        (pool.num_cached_free, pool.block_of, pool.hash_of),
        (0, {}, {}),
        "block 0 stays free, and nothing is found there any more.",
    )
    pool.remember(1, b"h")
    pool.forget(1)
    expect("num_cached_free", pool.num_cached_free, 0, "block 1 was in use: never cached and free.")


class Unsearched(OrderedDict[Any, Any]):
    """A dict that nobody may walk through, at whatever length."""

    def _search(self) -> Any:
        raise Wrong(
            "The pool looks through its blocks. That takes the longer the larger it is, at every "
            "token: ask the dicts for a key, and the free blocks for their first (popitem)."
        )

    __iter__ = __reversed__ = keys = values = items = _search


def check_pool_evicts(parts: Parts) -> None:
    """Content is forgotten when a block is taken, and a hit takes a block off the free list."""
    pool = parts.CachingBlockPool(4, [])
    for block in [pool.allocate() for _ in range(3)]:
        pool.remember(block, b"%d" % block)
    pool.free(1)
    pool.free(0)
    story = "Blocks 0, 1, 2 with content, free(1), free(0). "
    expect(
        f"{story}free_blocks",
        list(pool.free_blocks),
        [3, 1, 0],
        "longest free first; 2 is in use.",
    )
    expect(f"{story}allocate()", pool.allocate(), 3, "3 has been free the longest.")
    expect("evictions", (pool.num_evictions, pool.events), (0, []), "there was nothing in block 3.")
    expect("allocate() again", pool.allocate(), 1, "1 came back before 0; 2 is in use.")
    expect(
        "block_of",
        pool.block_of,
        {b"0": 0, b"2": 2},
        "block 1 will be overwritten: whoever found its old content would read another's.",
    )
    expect(
        "num_cached_free",
        pool.num_cached_free,
        1,
        "block 0 is free and can be found; block 1, which counted, is not free any more.",
    )
    told = [(event.type, event.blocks) for event in pool.events]
    expect("events", told, [("evict", [1])], "the trace shows what the cache lost.")
    expect("num_evictions", pool.num_evictions, 1, "one content was lost.")
    pool.share(0)
    expect(
        "share(0), which is free: free_blocks, ref_counts[0], num_cached_free",
        (list(pool.free_blocks), pool.ref_counts[0], pool.num_cached_free),
        ([], 1, 0),
        "a request found it: it is in use again, and must not be given to anybody.",
    )
    pool.share(0)
    expect("share(0) again: ref_counts[0]", pool.ref_counts[0], 2, "two tables hold it.")
    pool.check_invariants()
    pool.free(3)
    for name in ("free", "share"):
        try:
            getattr(pool, name)(3)
        except AssertionError:
            continue
        raise Wrong(
            f"Nobody holds block 3, nothing is found there, and {name}(3) does not complain. "
            "Only a bug does that, and it would give a block to two requests much later: assert it."
        )
    pool.free_blocks = Unsearched(pool.free_blocks)
    pool.block_of, pool.hash_of = Unsearched(pool.block_of), Unsearched(pool.hash_of)
    pool.share(2)
    pool.free(2)
    pool.free(0)
    pool.free(0)
    pool.share(0)
    pool.remember(pool.allocate(), b"3")


# --- the cache ----------------------------------------------------------------------------------


def cache(parts: Parts, num_blocks: int) -> Any:
    """A prefix cache of the reader's over tables and a pool that are right; blocks of 4."""
    from m3_paged.block_manager import BlockManager
    from m4_prefix_chunked.caching_pool import CachingBlockPool

    pool = CachingBlockPool(num_blocks, [])
    return parts.PrefixCache(BlockManager(pool, 4, pool.events), pool)


def request(name: str, prompt: str, num_own: int, salt: str = "") -> Request:
    """A request whose prompt begins with named blocks of 4 tokens."""
    return Ask(name, num_own, 8, prompt=prompt, salt=salt).requests(0, 4)[0]


def _found(own: Any, prompt: str, num_own: int, salt: str = "") -> tuple[list[int], int]:
    hit = own.find(request("x", prompt, num_own, salt))
    own.hashes.pop("x", None)
    return hit.blocks, hit.num_tokens


def check_find(parts: Parts) -> None:
    """Full blocks are found by what is in them and before them."""
    own = cache(parts, 6)
    a = request("a", "AB", 3)
    own.kv.allocate("a", 12)
    own.make_findable(a, 6)
    expect(
        "a has the prompt A B and 3 tokens in blocks 0, 1, 2. make_findable(a, 6): blocks found",
        sorted(own.pool.hash_of),
        [0],
        "6 tokens fill block 0 alone. A block that is not full is not findable: more would come.",
    )
    own.begin_step()
    own.make_findable(a, 11)
    expect("make_findable(a, 11)", sorted(own.pool.hash_of), [0, 1], "two blocks are full.")
    expect("pending", own.pending, {1}, "block 1 is completed by the step that is being planned.")
    a.num_in_flight = 1
    own.make_findable(a, 12)
    expect(
        "make_findable(a, 12), token 11 being sampled",
        sorted(own.pool.hash_of),
        [0, 1],
        "block 2 is named by its tokens, of which the last is not known yet.",
    )
    expect(
        "find: A B, whose block 1 is pending",
        _found(own, "AB", 0),
        ([0], 4),
        "all is cached, and the last token is computed nevertheless. It would be written into a "
        "copy of block 1, which has not been written itself.",
    )
    own.begin_step()
    for prompt, num_own, wanted, why in (
        ("AB", 2, ([0, 1], 8), "both blocks are cached, 2 tokens are not."),
        ("AC", 2, ([0], 4), "A is cached, C is not."),
        ("BA", 2, ([], 0), "B was cached after A. At the beginning it is another block."),
        ("CB", 2, ([], 0), "B is cached after A, not after C."),
        ("", 3, ([], 0), "no block is full."),
        (
            "AB",
            0,
            ([0, 1], 7),
            "the last token is computed whatever is cached: its logits give the next one. The hit "
            "saves at most all but one.",
        ),
    ):
        words = " ".join(prompt) or "no full block"
        expect(f"find: {words} and {num_own} more", _found(own, prompt, num_own), wanted, why)
    expect(
        "find: A B and 2 more, with another cache_salt",
        _found(own, "AB", 2, "tenant"),
        ([], 0),
        "salts keep tenants apart.",
    )
    a.append_token(SampledToken(7))
    own.make_findable(a, 12)
    expect(
        "token 11 is known. make_findable(a, 12)",
        sorted(own.pool.hash_of),
        [0, 1, 2],
        "blocks that fill while decoding are cached, too.",
    )


def check_tables(parts: Parts) -> None:
    """A table begins with what is found, and memory is counted rightly."""
    own = cache(parts, 4)
    a = request("a", "AB", 1)
    own.kv.allocate("a", 9)
    own.make_findable(a, 9)
    own.begin_step()
    story = "4 blocks; a, with A B and 1 token, has blocks 0, 1, 2. "

    def can(prompt: str, num_own: int) -> bool:
        x = request("x", prompt, num_own)
        hit = own.find(x)
        own.hashes.pop("x", None)
        return bool(own.can_allocate(x, hit))

    expect(
        f"{story}can_allocate: A B and 2",
        can("AB", 2),
        True,
        "3 blocks, 2 of them shared with a: 1 is lacking, 1 is free.",
    )
    expect("can_allocate: A B and 5", can("AB", 5), False, "2 are lacking, 1 is free.")
    expect("can_allocate: A B", can("AB", 0), True, "1 for the copy of block 1; 1 is free.")
    expect(
        "can_allocate: 4 tokens, 3 of which were swapped out and come back without blocks",
        own.can_allocate(request("x", "", 4), PrefixHit([], 3)),
        True,
        "1 block is needed, and 1 is free.",
    )
    own.kv.allocate("z", 4)
    expect(
        "no block is free. can_allocate: A B",
        can("AB", 0),
        False,
        "its last token is written into block 1, which a holds: the copy needs a free block.",
    )
    own.kv.free("z")
    own.kv.free("a")
    own.release(a)
    expect(
        "a is preempted: names of its blocks that are still known",
        len(own.hashes.get("a", [])),
        2,
        "it comes back, and asks for them again: each block is hashed once.",
    )
    story = "Nobody has blocks any more; 0 and 1 are free and have A B. "
    expect(f"{story}can_allocate: A B and 8", can("AB", 8), True, "4 blocks in all.")
    expect(
        "can_allocate: A B and 9",
        can("AB", 9),
        False,
        "3 blocks are lacking and 4 are free, but two of these are the hit's own: they come off "
        "the free list.",
    )
    b = request("b", "AB", 2)
    expect("allocate for A B and 2: copies", own.allocate(b, own.find(b)), [], "nothing is shared.")
    expect(
        "its table",
        own.kv.block_tables.get("b"),
        [0, 1, 3],
        "it begins with the blocks that were found. They are taken before a new one is: that could "
        "be one of them.",
    )
    expect("num_findable of b", own.num_findable.get("b"), 2, "two of its blocks are findable.")
    c = request("c", "AB", 0)
    expect(
        "then allocate for A B: copies",
        own.allocate(c, own.find(c)),
        [(1, 2)],
        "token 7 is computed again, and is written into a copy of block 1, which b holds.",
    )
    expect("its table", own.kv.block_tables.get("c"), [0, 2], "block 0 is shared.")
    own.kv.free("b")
    own.release(b)
    own.kv.allocate("z", 4)
    expect(
        "b has gone, and block 1 alone is free. can_allocate: A B",
        can("AB", 0),
        True,
        "block 1 is the hit's own, and nobody holds it: its last token is written there, without "
        "a copy.",
    )
    own.kv.check_invariants()


# --- the scheduler ------------------------------------------------------------------------------


def scheduler(parts: Parts, num_blocks: int, **fields: Any) -> Any:
    """A scheduler of the reader's: blocks of 4, 8 tokens a step, no caching if not asked for."""
    defaults = {"max_num_seqs": 4, "block_size": 4, "max_num_batched_tokens": 8}
    config = EngineConfig(**{**defaults, "enable_prefix_caching": False, **fields})
    return parts.Scheduler(config, 16, num_blocks)


def check_chunks(parts: Parts) -> None:
    """A prompt is cut where the budget ends."""
    traffic = {0: [Ask("a", 12, 1), Ask("b", 6, 1), Ask("c", 3, 1)]}
    play(
        scheduler(parts, 8),
        traffic,
        [
            At("a[0:8] +a", "8 tokens are the whole step: b waits.", {"b": "left"}),
            At("a[8:12] b[0:4] +b", "a's last 4 tokens; b begins with the 4 that are left."),
            At("b[4:6] c[0:3] +c", "the prompt under way comes before the one that waits."),
        ],
    )
    play(
        scheduler(parts, 8, long_prefill_token_threshold=5),
        traffic,
        [
            At("a[0:5] b[0:3] +a +b", "a row has at most 5 tokens: b gets what a must leave."),
            At("a[5:10] b[3:6]", "the same again.", {"c": "left"}),
            At("a[10:12] c[0:3] +c", "a and c fit whole."),
        ],
    )
    play(
        scheduler(parts, 8, enable_chunked_prefill=False, max_num_batched_tokens=16),
        traffic,
        [
            At("a[0:12] +a", "4 tokens are left; b's 6 come whole or not at all.", {"b": "6"}),
            At("b[0:6] c[0:3] +b +c"),
        ],
    )
    play(
        scheduler(parts, 4),
        {0: [Ask("a", 6, 1), Ask("b", 10, 1)]},
        [
            At("a[0:6] +a", "b could begin with 2 tokens; its 3 blocks are not free.", {"b": "KV"}),
            At("b[0:8] +b", "a request has blocks for its whole prompt when it is admitted."),
            At("b[8:10]"),
        ],
    )


def check_decode(parts: Parts) -> None:
    """Decode rows come first, or not, by policy."""
    arrivals = {0: [Ask("a", 2, 5), Ask("b", 2, 5)], 1: [Ask("p", 11, 2)]}
    play(
        scheduler(parts, 8),
        arrivals,
        [
            At("a[0:2] b[0:2] +a +b"),
            At("a[2:3] b[2:3] p[0:6] +p", "two decode rows leave 6 of 8 tokens for p's prompt."),
            At("a[3:4] b[3:4] p[6:11]", "p's chunk is its last and samples; a and b stand first."),
            At("a[4:5] b[4:5] p[11:12]", "p decodes."),
            At("a[5:6] b[5:6]"),
        ],
    )
    play(
        scheduler(parts, 8, prefill_policy="prefill_first"),
        arrivals,
        [
            At("a[0:2] b[0:2] +a +b"),
            At("p[0:8] +p", "a step with rows of prompts has no others: a and b stand still."),
            At("p[8:11]", "p's prompt is still under way."),
            At("a[2:3] b[2:3] p[11:12]", "no prompt is left: all decode."),
            *(At(f"a[{n}:{n + 1}] b[{n}:{n + 1}]") for n in (3, 4, 5)),
        ],
    )
    play(
        scheduler(parts, 8, max_num_batched_tokens=2),
        {0: [Ask(name, 1, 2) for name in "abc"]},
        [
            At("a[0:1] b[0:1] +a +b"),
            At("a[1:2] b[1:2]", "with chunks a budget may be below max_num_seqs: c waits."),
            At("c[0:1] +c"),
            At("c[1:2]"),
        ],
    )
    play(
        scheduler(parts, 4),
        {0: [Ask("a", 4, 3), Ask("b", 4, 3)], 1: [Ask("c", 4, 2)], 2: [Ask("d", 1, 1)]},
        [
            At("a[0:4] b[0:4] +a +b"),
            At("a[4:5] b[4:5]", "both grow by a block: none is left for c.", {"c": "KV"}),
            At("a[5:6] b[5:6]", "c waits, and d does not overtake.", {"c": "KV"}),
            At("c[0:4] d[0:1] +c +d"),
            At("c[4:5]"),
        ],
    )
    play(
        scheduler(parts, 4),
        {0: [Ask("a", 4, 3), Ask("b", 3, 3), Ask("c", 4, 2)]},
        [
            At("a[0:4] b[0:3] c[0:1] +a +b +c", "c's first chunk is 1 token."),
            At("a[4:5] b[3:4] c[1:4]", "a takes the last block."),
            At("a[5:6] b[4:5] -c", "b needs a block: c, the newest, goes. c has no row."),
            At("c[0:5] ^c", "its prompt and the token that it had, computed again."),
        ],
    )
    play(
        scheduler(parts, 4, policy="priority", max_num_batched_tokens=16),
        {0: [Ask("high", 4, 4), Ask("low", 9, 2, priority=5)], 1: [Ask("mid", 1, 1, priority=2)]},
        [
            At("high[0:4] low[0:9] +high +low", "all 4 blocks are taken."),
            At("high[4:5] -low", "mid would fit, but nobody is admitted in a step that preempts."),
            At("high[5:6] mid[0:1] +mid"),
        ],
        is_whole=False,
    )
    play(
        scheduler(parts, 8),
        {0: [Ask("a", 9, 2, n=2)]},
        [
            At("a[0:8] +a"),
            At(
                "a[8:9] +a/1",
                "a lacks one token only, but its second completion has not begun: it is a prompt "
                "under way. a/1 begins with what this row samples, and has no row yet.",
            ),
            At("a[9:10] a/1[9:10]", "both completions decode."),
        ],
    )


def check_hits(parts: Parts) -> None:
    """Hits save tokens, in the same step and after their request has gone."""

    def make(num_blocks: int = 16, **fields: Any) -> Any:
        fields = {"enable_prefix_caching": True, "max_num_batched_tokens": 32, **fields}
        return scheduler(parts, num_blocks, **fields)

    play(
        make(),
        {
            0: [Ask("a", 2, 2, prompt="AB")],
            1: [
                Ask("b", 3, 2, prompt="AB"),
                Ask("c", 1, 2, prompt="AC"),
                Ask("d", 1, 1, prompt="BA"),
            ],
        },
        [
            At("a[0:10] +a", "nothing is cached yet."),
            At(
                "a[10:11] b[8:11] c[4:9] d[0:9] +b +c +d",
                "b begins with A B: 8 tokens are computed already. c shares A alone, and d "
                "nothing: B at its beginning is not B after A.",
            ),
            At("b[11:12] c[9:10]"),
        ],
    )
    play(
        make(),
        {
            0: [Ask("a", 1, 1, prompt="AB"), Ask("b", 2, 1, prompt="AB")],
            2: [Ask("c", 0, 1, prompt="AB")],
        },
        [
            At("a[0:9] b[8:10] +a +b", "two come in one step: still only one pays."),
            At(""),
            At(
                "c[7:8] +c",
                "a and b have gone, and their blocks have their content still. All of "
                "c's prompt is cached; its last token is computed.",
            ),
        ],
    )
    play(
        make(enable_chunked_prefill=False, max_num_batched_tokens=16),
        {0: [Ask("a", 5, 1, prompt="AB"), Ask("b", 2, 1, prompt="AB")]},
        [
            At(
                "a[0:13] b[8:10] +a +b",
                "prompts come whole here. a leaves 3 tokens; of b's 10 the hit saves 8: 2 are new.",
            ),
        ],
    )
    play(
        make(),
        {0: [Ask("a", 3, 6)], 6: [Ask("b", 1, 1)]},
        [
            At("a[0:3] +a"),
            *(At(f"a[{n}:{n + 1}]") for n in range(3, 8)),
            At("b[0:1] +b"),
        ],
    )
    play(
        make(4),
        {0: [Ask("a", 1, 1, prompt="A")], 1: [Ask("b", 14, 2)], 3: [Ask("c", 1, 1, prompt="A")]},
        [
            At("a[0:5] +a"),
            At("b[0:14] +b", "b's prompt takes all 4 blocks: what a left there is evicted."),
            At("b[14:15]"),
            At("c[0:5] +c", "A is no longer cached."),
        ],
    )

    def fail(own: Any, requests: Any) -> None:
        own.finish(requests["a"], "error")

    play(
        make(),
        {0: [Ask("a", 1, 9, prompt="AB")], 1: [Ask("b", 2, 1, prompt="AB")]},
        [
            At("a[0:9] +a"),
            At(
                "b[0:10] +b",
                'a ended with "error": what is in its blocks may be wrong, and must not be found.',
            ),
        ],
        {0: ("a ends with an error", fail)},
    )
    own = make()
    play(
        own,
        {0: [Ask("a", 3, 3)]},
        [At("a[0:3] +a"), At("a[3:4]"), At("a[4:5]")],
    )
    expect(
        "a had 3 tokens and generated 3, of which 5 were computed; it has gone. Blocks found",
        len(own.kv.pool.hash_of),
        1,
        "tokens 0 to 3 fill a block. It filled while a decoded: that is cached, too.",
    )


def check_traffic(parts: Parts) -> None:
    """Random traffic, the same decisions as M4's."""

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

    check_random_traffic(make, "m4_prefix_chunked", parts, ask)


def check_serves(parts: Parts) -> None:
    """A tiny model's tokens are those of M4."""
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 16, "kv_cache_tokens": 64}
    check_engine("m4_prefix_chunked", parts, block_size=4, **limits)


STEPS = [
    Step(
        "names of blocks",
        "block_hashes.py",
        "Write `hash_block`: the name of a full block.",
        check_names,
    ),
    Step(
        "a pool that remembers",
        "caching_pool.py",
        "Write `remember`, `forget`, `free`, and `allocate` as far as M3's pool has it. A block "
        "that is freed keeps its content.",
        check_pool_remembers,
    ),
    Step(
        "eviction, and a hit on a free block",
        "caching_pool.py",
        "`allocate` takes the block that has been free the longest; if it has content, that is "
        "evicted. Write `share`: a free block that is found comes off the free list. Freeing a "
        "free block, or sharing one in which nothing is found, is a bug, and is asserted.",
        check_pool_evicts,
    ),
    Step(
        "a hit",
        "prefix_cache.py",
        "Write `make_findable` and `find`: full blocks are found by their names, one after the "
        "other from the beginning of a prompt.",
        check_find,
    ),
    Step(
        "a table that begins with a hit",
        "prefix_cache.py",
        "Write `can_allocate` and `allocate`. Blocks of the hit that are free are not free for "
        "others.",
        check_tables,
    ),
    Step(
        "chunks",
        "scheduler.py",
        "Prompts alone, without caching: write `schedule` with `_prefill`, `_add_row`, "
        "`reason_to_wait`, `_admit` and `free_memory`. A prompt gets as many tokens of a step as "
        "are left, and goes on in the next.",
        check_chunks,
    ),
    Step(
        "decode rows beside chunks",
        "scheduler.py",
        "Write `_decode`, and both policies in `schedule`: decode rows first, so that no long "
        'prompt makes them wait ("mixed"), or prompts first ("prefill_first").',
        check_decode,
    ),
    Step(
        "hits in the scheduler",
        "scheduler.py",
        "In `_admit`, what the cache found counts as computed. In `free_memory`, what a request "
        "has computed stays findable, unless it ended with an error.",
        check_hits,
    ),
    Step(
        "random traffic",
        "scheduler.py",
        "Nothing new to write: the same decisions as M4's scheduler, whatever comes.",
        check_traffic,
    ),
    Step(
        "your engine serves a model",
        "scheduler.py",
        "Nothing new to write: an engine with your parts gives the same tokens as M4.",
        check_serves,
        seconds=100,
        needs_model=True,
    ),
]
