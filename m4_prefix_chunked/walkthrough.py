"""M4's walkthrough: a hit, an eviction and a chunk, from the hash of a block to the bill.

    python -m m4_prefix_chunked.walkthrough          stops in pdb, with a card at each stop
    python -m m4_prefix_chunked.walkthrough --auto   prints docs/transcripts/m4_walkthrough.txt

Five requests on ten blocks of four tokens; four of them begin with the same eight tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from m1_single import SamplingParams
from m3_paged.runner import ModelRunner
from milestone_llm.walkthrough.runner import Look, Stop, run_walkthrough

from .caching_pool import CachingBlockPool
from .engine import LLMEngine
from .prefix_cache import PrefixCache, hash_block
from .scheduler import Scheduler

TITLE = "M4: a hit, an eviction, a chunk"
INTRO = """
Ten KV blocks of four tokens, and steps of at most twelve tokens (max_num_batched_tokens=12). Four
of the five requests begin with the same eight tokens, which stand for a system prompt: two blocks.

r0 comes alone and pays for them. When it is done, r1 and r2 come; r2 is nothing but those eight
tokens. While both decode, r3 comes with 18 tokens that nobody has seen: too many for one step, and
more blocks than were never used. r4 then goes on with the conversation of r0.

Watch which tokens are computed, and what becomes of blocks that nobody owns.
"""

SYSTEM_PROMPT = [11, 12, 13, 14, 15, 16, 17, 18]
QUESTION = [*SYSTEM_PROMPT, 21, 22, 23]

_FREE = "list(self.pool.free_blocks)"
_ROWS = "[(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]"
_TABLES = "self.owners"

STOPS = [
    Stop(
        "another scheduler, M3's runner",
        LLMEngine._step,
        "The loop is M1's and the runner is M3's. Finding what is in the cache and cutting prompts "
        "into chunks are decisions: no tensor code changes for them.",
        [
            Look("type(self.scheduler).__module__", "who decides", "m4_prefix_chunked.scheduler"),
            Look("type(self.runner).__module__", "who computes", "m3_paged.runner"),
            Look("type(self.scheduler.kv).__name__", "who keeps the block tables", "PrefixCache"),
        ],
        commands=["w  who called us", "ll  the whole step"],
    ),
    Stop(
        "the name of a block",
        hash_block,
        "A full block is known by a hash of its tokens and of its parent, the block before it. The "
        "first block's parent is the hash of the request's cache_salt, so that tenants with "
        "different salts never meet.",
        [
            Look("token_ids", "the first block of r0", [11, 12, 13, 14]),
            Look("parent.hex()[:8]", "its parent: the hash of an empty salt", "e3b0c442"),
            Look("__return__.hex()[:8]", "its name (the first 4 of 32 bytes)", "96d14081"),
        ],
        at="return",
        commands=["ll", "u  _hash(), which computes each hash once"],
    ),
    Stop(
        "nothing is known of r0",
        PrefixCache.find_prefix,
        "Before r0 is admitted the scheduler asks for the longest cached prefix, block by block "
        "from the first. The walk ends at the first block that nobody has: what comes after it "
        "cannot be known either, since its name contains this one's.",
        [
            Look("request.num_tokens", "known tokens of r0", 11),
            Look("self.pool.block_of", "names of cached blocks", {}),
            Look("__return__", "blocks found, tokens saved", ([], 0)),
        ],
        at="return",
        commands=["ll", "u  reason_to_wait(), which needs it to count tokens and blocks"],
    ),
    Stop(
        "two blocks become findable",
        PrefixCache.cache_full_blocks,
        "The step will compute tokens 0 to 10 of r0 and so fill two blocks. They get their names "
        "when the step is planned, not when it is done: a second request with these tokens could "
        "join the same step. Block 2 has three of four tokens and no name.",
        [
            Look("(start, end)", "tokens of the row", (0, 11)),
            Look(_TABLES, "block tables", {"r0": [0, 1, 2]}),
            Look("list(self.pool.block_of.values())", "blocks that can be found", [0, 1]),
            Look("self.pending", "of these, not written yet", {0, 1}),
            Look(
                "[name.hex()[:8] for name in self.hashes['r0']]",
                "the chain: the first name is part of the second",
                ["96d14081", "af8a0bb7"],
            ),
        ],
        at="return",
        commands=["p self.hashes['r0'][1] == hash_block(self.hashes['r0'][0], [15, 16, 17, 18])"],
    ),
    Stop(
        "a block filled while decoding",
        CachingBlockPool.remember,
        "In the second step r0 computes the token it has just sampled, and that fills block 2. "
        "Generated tokens are cached like those of a prompt, for in a conversation they come back "
        "as part of the next one.",
        [
            Look("block", "the block", 2),
            Look("sorted(self.hash_of)", "blocks that can be found", [0, 1, 2]),
            Look("__return__", "whether it is the first block of this content", True),
        ],
        at="return",
        when="block == 2",
        commands=["u  cache_full_blocks()", "p start, end", "p request.token_ids[8:12]"],
    ),
    Stop(
        "r0 is done, its blocks are not",
        Scheduler._end,
        "The four blocks go to the end of the free list, behind those that were never used, and "
        "the last one goes first: if memory gets short the end of a prefix is given up before its "
        "beginning, which more requests may share. Blocks 0, 1 and 2 keep content and name.",
        [
            Look("list(self.kv.pool.free_blocks)", "free", [4, 5, 6, 7, 8, 9, 3, 2, 1, 0]),
            Look("self.kv.pool.num_used", "blocks in use", 0),
            Look("self.kv.pool.num_cached_free", "free, but they can be found", 3),
        ],
        at="return",
        when="finished",
        commands=["p sorted(self.kv.pool.hash_of)", "p self.running"],
    ),
    Stop(
        "r1 finds two blocks",
        PrefixCache.find_prefix,
        "r1 begins with the same eight tokens. Two lookups find blocks 0 and 1, though nobody owns "
        "them; the third block is not full, so there is nothing to look up.",
        [
            Look("request.num_tokens", "known tokens of r1", 10),
            Look("__return__", "blocks found, tokens saved", ([0, 1], 8)),
        ],
        at="return",
        when="request.request_id == 'r1'",
        commands=["p [name.hex()[:8] for name in self.hashes['r1']]  the names are those of r0"],
    ),
    Stop(
        "a hit takes blocks off the free list",
        PrefixCache.allocate_with_prefix,
        "The cached blocks are shared first, which takes them out of the middle of the free list, "
        "and only then is a new one allocated: in the other order it might have been one of them. "
        "r1 starts as if eight of its tokens had been computed.",
        [
            Look(_TABLES, "block tables", {"r1": [0, 1, 4]}),
            Look(_FREE, "free", [5, 6, 7, 8, 9, 3, 2]),
            Look("__return__", "tokens saved, copies to make", (8, [])),
        ],
        at="return",
        when="request.request_id == 'r1'",
        commands=["p self.counts", "u  _allocate()", "p request.num_computed_tokens"],
    ),
    Stop(
        "all of r2 is cached",
        PrefixCache.find_prefix,
        "r2 is those eight tokens and no more. Both blocks are found, yet only seven tokens are "
        "saved: the logits of the last one are wanted, so that one is computed again.",
        [
            Look("request.num_tokens", "known tokens of r2", 8),
            Look("__return__", "blocks found, tokens saved", ([0, 1], 7)),
        ],
        at="return",
        when="request.request_id == 'r2'",
        commands=["ll", "p self.pending"],
    ),
    Stop(
        "nobody writes into a shared block",
        PrefixCache.allocate_with_prefix,
        "The last token of r2 lies in block 1, which r1 holds too. To compute it is to write it, "
        "and whoever writes into a shared block gets a copy first: M3's copy-on-write, as it is.",
        [
            Look("__return__", "tokens saved, copies to make", (7, [(1, 5)])),
            Look(_TABLES, "block tables", {"r1": [0, 1, 4], "r2": [0, 5]}),
            Look("self.pool.ref_counts[:6]", "owners of blocks 0 to 5", [2, 1, 0, 0, 1, 1]),
        ],
        at="return",
        when="request.request_id == 'r2'",
        commands=["p [(e.type, e.request_id, e.blocks) for e in self.events]"],
    ),
    Stop(
        "three tokens instead of eighteen",
        Scheduler.schedule,
        "Two prompts of ten and eight tokens, and the step computes three tokens. That is why a "
        "cached prompt gives its first token so much sooner.",
        [
            Look(
                _ROWS,
                "id, phase, start, tokens",
                [("r1", "prefill", 8, 2), ("r2", "prefill", 7, 1)],
            ),
            Look("[row.num_cached_tokens for row in __return__.rows]", "tokens saved", [8, 7]),
            Look("__return__.copies", "to copy before the forward", [(1, 5)]),
        ],
        at="return",
        when="len(__return__.rows) == 2",
        commands=["pp __return__.rows"],
    ),
    Stop(
        "decode rows come first",
        Scheduler._decode,
        "Two steps later r3 waits with 18 tokens. The decode rows of r1 and r2 take one token each "
        "of the twelve, whoever waits; what is left goes to prompts.",
        [
            Look("[row.request.request_id for row in plan.rows]", "rows of the step", ["r1", "r2"]),
            Look("[r.request_id for r in self.waiting]", "who waits", ["r3"]),
            Look("__return__", "tokens left: 12 - 2", 10),
        ],
        at="return",
        when="self.waiting and plan.rows",
        commands=["ll", "u  schedule(), with the other policy", "ll"],
    ),
    Stop(
        "an eviction",
        CachingBlockPool.allocate,
        "r3 needs five blocks for all of its tokens, though the first chunk fills fewer: a prompt "
        "once begun must not run out of memory half way. Three were never used, block 3 held "
        "tokens without a name; the fifth is the cached block that has been free the longest.",
        [
            Look("__return__", "the block allocated", 2),
            Look("self.evicted", "blocks that lost their content", [2]),
            Look("sorted(self.hash_of)", "blocks that can still be found", [0, 1, 4]),
            Look("list(self.free_blocks)", "free", []),
        ],
        at="return",
        when="self.evicted",
        commands=["u  _grow()", "u  append()", "u  allocate_with_prefix()", "p self.owners"],
    ),
    Stop(
        "a chunk",
        Scheduler._add_row,
        "The row of r3 wanted 18 tokens and is cut to the ten that the step has left. Nothing else "
        "marks a chunk: it is a row that ends before the last known token.",
        [
            Look("row.request.request_id", "whose row", "r3"),
            Look("(row.start, row.end, row.request.num_tokens)", "from, to, known", (0, 10, 18)),
            Look("row.samples", "whether a token will be sampled", False),
            Look("__return__", "tokens taken of the budget", 10),
        ],
        at="return",
        when="row.request.request_id == 'r3'",
        commands=["p self.config.long_prefill_token_threshold  would cut further", "ll"],
    ),
    Stop(
        "nobody's next token has waited",
        ModelRunner.execute,
        "One forward computed a decode row each for r1 and r2 and ten tokens of r3. Two tokens "
        "come out of it. With prefill_policy='prefill_first', r1 and r2 would have waited for "
        "both chunks of r3.",
        [
            Look("plan.num_tokens", "tokens computed", 12),
            Look("sorted(__return__)", "who got a token", ["r1", "r2"]),
        ],
        at="return",
        when="len(plan.rows) == 3",
        commands=["pp [(row.request.request_id, row.start, row.end) for row in plan.rows]"],
    ),
    Stop(
        "the last chunk samples",
        Scheduler.schedule,
        "r1 is done. The next step takes the other eight tokens of r3, beside the decode row of "
        "r2. The row reaches the last known token, and so r3 gets its first one.",
        [
            Look(
                _ROWS,
                "id, phase, start, tokens",
                [("r2", "decode", 10, 1), ("r3", "prefill", 10, 8)],
            ),
            Look("[row.samples for row in __return__.rows]", "which rows sample", [True, True]),
        ],
        at="return",
        when="[r.request_id for r in self.running] == ['r2', 'r3']",
        commands=["p [row.request.num_computed_tokens for row in __return__.rows]"],
    ),
    Stop(
        "what the eviction costs",
        PrefixCache.find_prefix,
        "r4 is the conversation of r0 going on: its eleven tokens, its three outputs, and one more "
        "word of the user. All three full blocks were in the cache once; the third went to r3. "
        "Four tokens are computed again: an eviction costs time, never a wrong answer.",
        [
            Look("request.num_tokens", "known tokens of r4", 15),
            Look("__return__", "blocks found, tokens saved", ([0, 1], 8)),
            Look(
                "self._hash(request, 2) in self.pool.block_of",
                "whether anybody has the third block",
                False,
            ),
        ],
        at="return",
        when="request.request_id == 'r4'",
        commands=["p request.token_ids", "p self.counts"],
    ),
    Stop(
        "blocks in use are not forgotten",
        PrefixCache.reset,
        "After a change of weights, cached keys and values are wrong and must go. While a request "
        "holds some of them that cannot be done, so the reset is refused, and the caller tries "
        "again when all are finished.",
        [
            Look("self.pool.num_used", "blocks in use", 4),
            Look("__return__", "whether the cache is empty now", False),
        ],
        at="return",
        commands=["ll", "p self.owners"],
    ),
    Stop(
        "the bill",
        LLMEngine.stats,
        "Of 62 prompt tokens 23 were saved and 39 computed, and nobody's output is different for "
        "it. The hit rate counts tokens: the share of those looked for that were found. The second "
        "eviction was for r4: block 4, which r1 had filled while decoding.",
        [
            Look(
                "__return__['prefix_cache']",
                "in requests, tokens, and blocks",
                {
                    "queries": 5,
                    "hits": 3,
                    "queried_tokens": 62,
                    "saved_tokens": 23,
                    "evictions": 2,
                    "hit_rate": 23 / 62,
                },
            ),
            Look("__return__['prefill_tokens']", "prompt tokens computed", 39),
            Look(
                "[[f'{row.request_id} +{row.num_new_tokens}' for row in record.batch] "
                "for record in self.tracer.records]",
                "rows of every step",
                [
                    ["r0 +11"],
                    ["r0 +1"],
                    ["r0 +1"],
                    ["r1 +2", "r2 +1"],
                    ["r1 +1", "r2 +1"],
                    ["r1 +1", "r2 +1", "r3 +10"],
                    ["r2 +1", "r3 +8"],
                    ["r4 +7"],
                    ["r4 +1"],
                ],
            ),
            Look(
                "[(e.type, e.request_id, e.blocks) for record in self.tracer.records "
                "for e in record.events if e.type in ('share', 'copy_on_write', 'evict')]",
                "what the trace says of the cache",
                [
                    ("share", "r1", [0, 1]),
                    ("share", "r2", [0, 1]),
                    ("copy_on_write", "r2", [1, 5]),
                    ("evict", None, [2]),
                    ("evict", None, [4]),
                    ("share", "r4", [0, 1]),
                ],
            ),
        ],
        at="return",
        commands=["pp __return__", "pp self.tracer.records[3].to_dict()"],
    ),
]


def scenario() -> None:
    """Five requests, each before the step that its part of the story needs."""
    engine = LLMEngine(
        "tiny-llama",
        max_num_seqs=3,
        max_num_batched_tokens=12,
        max_model_len=32,
        block_size=4,
        kv_cache_tokens=40,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    (first,) = engine.generate([QUESTION], _exactly(3))
    engine.add_request([*SYSTEM_PROMPT, 31, 32], _exactly(3))
    engine.add_request(SYSTEM_PROMPT, _exactly(4))
    for _ in range(2):
        engine.step()
    engine.add_request(list(range(41, 59)), _exactly(1))
    for _ in range(2):
        engine.step()
    engine.add_request([*QUESTION, *first.token_ids, 24], _exactly(2))
    engine.step()
    engine.reset_prefix_cache()
    while engine.has_unfinished_requests():
        engine.step()
    engine.stats()


def _exactly(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the walkthrough; returns the exit code."""
    return run_walkthrough(TITLE, INTRO, STOPS, scenario, argv)


if __name__ == "__main__":
    sys.exit(main())
