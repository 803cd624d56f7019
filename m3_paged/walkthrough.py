"""M3's walkthrough: a block allocated, a table that grows, a preemption, a copy-on-write.

    python -m m3_paged.walkthrough          stops in pdb, with a card at each stop
    python -m m3_paged.walkthrough --auto   prints docs/transcripts/m3_walkthrough.txt

Two requests on memory for one and a half, then one prompt with two completions.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from m1_single import SamplingParams
from milestone_llm.walkthrough.runner import Look, Stop, run_walkthrough

from .attention import AttentionMetadata, DecodeGroup
from .block_cache import BlockCache
from .block_manager import BlockManager
from .engine import LLMEngine
from .scheduler import Scheduler

TITLE = "M3: KV memory in blocks"
INTRO = """
The KV cache holds 20 tokens, and a request may have up to 16 (max_model_len=16). In slots that
is memory for one request. Here it is five blocks of four tokens, and two requests come: r0 with a
prompt of 6 tokens that wants 5 more, and r1 with 7 that wants 7. Together they grow to 11 and 14
tokens, or 3 and 4 blocks: two more than there are.

When both are done, a third prompt asks for two completions (n=2).

Watch the block tables: who gets which block, who must give his back, and which are shared.
"""

_ROWS = "[(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]"
_TABLES = "self.owners"
_QUEUE = "[r.request_id for r in self.waiting]"

STOPS = [
    Stop(
        "the pool",
        BlockManager.__init__,
        "All KV memory is cut into blocks, and a list says which are free. Nobody's memory is set "
        "aside: a block belongs to whoever asks first. The manager counts blocks and knows no "
        "tensors.",
        [
            Look("(num_blocks, block_size)", "blocks, and tokens in each", (5, 4)),
            Look("list(self.pool.free_blocks)", "all are free", [0, 1, 2, 3, 4]),
        ],
        at="return",
        commands=["u  the scheduler, which builds it", "l"],
    ),
    Stop(
        "a block is allocated",
        BlockManager.allocate,
        "r0 is admitted, and gets room for the 6 tokens that are known of it, not for the 16 that "
        "it might have. Its block table lists the blocks in the order of its tokens. A reference "
        "count says how many tables hold a block.",
        [
            Look("num_tokens", "tokens to find room for", 6),
            Look(_TABLES, "block tables", {"r0": [0, 1]}),
            Look("self.pool.ref_counts", "tables that hold blocks 0 to 4", [1, 1, 0, 0, 0]),
        ],
        at="return",
        commands=["u", "p self.kv.describe(16)  what a slot would have taken"],
    ),
    Stop(
        "two requests in the memory of one slot",
        Scheduler.schedule,
        "r1 is admitted as well: its 7 tokens take two blocks, and one is still free. That both "
        "could not grow to their full length is no reason to let one wait now.",
        [
            Look(_ROWS, "rows of the step", [("r0", "prefill", 0, 6), ("r1", "prefill", 0, 7)]),
            Look("self.kv.owners", "block tables", {"r0": [0, 1], "r1": [2, 3]}),
            Look("self.kv.pool.num_free", "free blocks", 1),
        ],
        at="return",
        commands=["pp __return__.rows[1]", "p self.kv_usage()"],
    ),
    Stop(
        "from tokens to slots",
        AttentionMetadata.build,
        "A token at position p lies in block table[p // 4], at offset p % 4. Block times four plus "
        "offset is its slot, a line of the KV tensors. The last blocks of r0 and r1 are not full, "
        "which wastes slots 6, 7 and 15, and no more.",
        [
            Look("[row.blocks for row in rows]", "block tables of the rows", [[0, 1], [2, 3]]),
            Look(
                "__return__.slot_mapping.tolist()",
                "slots of the 13 tokens",
                [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 14],
            ),
        ],
        at="return",
        commands=["p cache.block_size", "u  attention_metadata(), then execute()"],
    ),
    Stop(
        "keys and values are stored",
        BlockCache.write,
        "Each layer has its keys and values in blocks, and stores the new tokens' at their slots. "
        "The table is the same for all layers.",
        [
            Look(
                "tuple(self.keys[layer].shape)",
                "[blocks, tokens of a block, KV heads, head size]",
                (5, 4, 2, 16),
            ),
            Look("tuple(key.shape)", "[new tokens, KV heads, head size]", (13, 2, 16)),
        ],
        commands=["p slot_mapping", "u  the attention function, called once a layer"],
    ),
    Stop(
        "a table grows",
        BlockManager.append,
        "Two steps later r1 has 9 tokens, and the ninth does not fit into two blocks. So its table "
        "grows by one, the last that is free. It lies wherever there was room; here it happens to "
        "be next to the others.",
        [
            Look("(request_id, start, end)", "tokens to be written", ("r1", 8, 9)),
            Look(_TABLES, "block tables", {"r0": [0, 1], "r1": [2, 3, 4]}),
            Look("self.pool.num_free", "free blocks", 0),
        ],
        at="return",
        when="request_id == 'r1' and end == 9",
        commands=["p self.events", "u"],
    ),
    Stop(
        "attention reads through the tables",
        BlockCache.gather,
        "Attention wants each request's keys in one piece. Plain torch cannot follow a table, so "
        "the blocks are copied side by side first; the shorter table is filled up with block 0. "
        "M5's kernel will read them where they lie.",
        [
            Look("block_tables.tolist()", "of r1 and r0", [[2, 3, 4], [0, 1, 0]]),
            Look(
                "tuple(__return__[0].shape)",
                "[rows, KV heads, positions, head size]",
                (2, 2, 12, 16),
            ),
        ],
        at="return",
        when="block_tables.tolist() == [[2, 3, 4], [0, 1, 0]]",
        commands=["u", "p group.context_lens"],
    ),
    Stop(
        "what lies beyond the last token is hidden",
        DecodeGroup.mask,
        "A mask is added to the attention scores: 0 where a row may look, minus infinity at "
        "positions that hold nothing yet or came from the block that filled up the table.",
        [
            Look(
                "(__return__ == 0).sum(-1).flatten().tolist()",
                "positions that r1 and r0 see",
                [9, 8],
            ),
        ],
        at="return",
        commands=["p __return__[1].flatten()"],
    ),
    Stop(
        "no block is left",
        BlockManager.can_append,
        "Now r0 has 9 tokens and needs a third block. None is free.",
        [
            Look("(request_id, start, end)", "tokens to be written", ("r0", 8, 9)),
            Look("self.num_blocks_for(end)", "blocks needed for 9 tokens", 3),
            Look("self.owners[request_id]", "blocks there are", [0, 1]),
            Look("self.pool.num_free", "free blocks", 0),
            Look("__return__", "whether it can go on", False),
        ],
        at="return",
        when="request_id == 'r0' and end == 9",
        commands=["u", "p self.by_seniority()[-1].request_id  who will have to go"],
    ),
    Stop(
        "a preemption, and its reason",
        Scheduler._preempt,
        "Somebody must give blocks back, and it is who was admitted last. r1 has 9 tokens in the "
        "cache, two of its output among them. A request that came first is never stopped for "
        "one that came later, so the first always gets on.",
        [
            Look("victim.request_id", "who has to go", "r1"),
            Look("reason", "why", "no free block for r0"),
            Look("self.config.preemption", "what becomes of its KV", "recompute"),
            Look("(victim.num_computed_tokens, victim.num_tokens)", "computed, known", (9, 10)),
        ],
        commands=["w", "p victim.output_token_ids"],
    ),
    Stop(
        "the victim keeps its tokens, not its KV",
        Scheduler._preempt,
        "All blocks of r1 are free again, and it stands in the queue, at the head. What it has "
        "generated so far it keeps: no token is ever taken back. What is computed starts at 0 "
        "again. With preemption='swap' its blocks would have been copied to host memory.",
        [
            Look("(victim.num_computed_tokens, victim.num_tokens)", "computed, known", (0, 10)),
            Look("victim.status.value", "its status", "waiting"),
            Look(_QUEUE, "the queue", ["r1"]),
            Look("list(self.kv.pool.free_blocks)", "free blocks", [4, 3, 2]),
        ],
        at="return",
        commands=["p self.num_preemptions"],
    ),
    Stop(
        "the step goes on without it",
        Scheduler.schedule,
        "r0 has its block and runs. Though two blocks are free, nobody is admitted in a step that "
        "preempted: memory is short, and a newcomer would be the next to go.",
        [
            Look(_ROWS, "rows of the step", [("r0", "decode", 8, 1)]),
            Look("len(__return__.preempted)", "preempted in this step", 1),
            Look("self.kv.pool.num_free", "free blocks", 2),
        ],
        at="return",
        commands=["p self.kv.owners"],
    ),
    Stop(
        "r1 has to wait",
        Scheduler.reason_to_wait,
        "In the next step r1 is asked again. It would need blocks for all that is known of it, "
        "prompt and output.",
        [
            Look(
                "__return__",
                "why it cannot run yet",
                "no KV memory: 10 tokens need 3 blocks, 2 are free",
            ),
        ],
        at="return",
        commands=["p budget  tokens that the step has left"],
    ),
    Stop(
        "r0 is done and leaves its blocks",
        Scheduler._release,
        "A block whose last reference goes is free at once, and can be anybody's in the next step.",
        [
            Look("[r.request_id for r in finished]", "who is done", ["r0"]),
            Look("self.kv.pool.num_free", "free blocks", 5),
        ],
        at="return",
        when="finished",
        commands=["p list(self.kv.pool.free_blocks)"],
    ),
    Stop(
        "r1 is resumed",
        Scheduler._start,
        "r1 gets other blocks than before, in another order, and nobody minds: the table says "
        "where they are. Its ten tokens are computed in one row, as if all were a prompt. Nine of "
        "them had been computed before: that is what a preemption costs.",
        [
            Look("[r.request_id for r in plan.resumed]", "resumed in this step", ["r1"]),
            Look("__return__.phase", "how the row is labelled", "prefill"),
            Look("(__return__.start, __return__.num_new_tokens)", "from where, how many", (0, 10)),
            Look("__return__.blocks", "its block table", [3, 2, 4]),
        ],
        at="return",
        when="request.request_id == 'r1' and request.metrics.num_preemptions",
        commands=["p request.token_ids"],
    ),
    Stop(
        "nobody lost a token",
        LLMEngine.generate,
        "Both have all they wanted. The tokens of r1 are those that it would have got alone, for "
        "the same tokens give the same KV, and a sampled token depends on its seed and position "
        "only.",
        [
            Look("[len(output.token_ids) for output in __return__]", "tokens each", [5, 7]),
            Look(
                "[output.metrics.num_preemptions for output in __return__]",
                "how often each was preempted",
                [0, 1],
            ),
            Look("self.stats()['kv']['watermark']", "most blocks ever used", 5),
        ],
        at="return",
        commands=["pp self.stats()", "pp self.tracer.records[3].to_dict()"],
    ),
    Stop(
        "one prompt, two completions",
        BlockManager.fork,
        "The prompt of r2 was computed once. Now r2/1 forks from it: it gets a copy of the table, "
        "not of the blocks, and the reference counts rise to two.",
        [
            Look(_TABLES, "block tables", {"r2": [0, 1], "r2/1": [0, 1]}),
            Look("self.pool.ref_counts", "tables that hold blocks 0 to 4", [2, 2, 0, 0, 0]),
            Look("self.pool.num_used", "blocks in use", 2),
        ],
        at="return",
        commands=["u", "p [fork.seed for fork in leader.forks]"],
    ),
    Stop(
        "a sharer wants to write",
        BlockManager.append,
        "The sixth token filled half of the second block, and each completion's own next token "
        "belongs behind it. r2 comes first. Since the block is shared, it takes a new one and "
        "leaves the old one to r2/1: copy-on-write. The first block is full, is never written "
        "again, and stays shared.",
        [
            Look("(request_id, start, end)", "tokens to be written", ("r2", 6, 7)),
            Look("__return__", "copies to make: (from, to)", [(1, 4)]),
            Look(_TABLES, "block tables", {"r2": [0, 4], "r2/1": [0, 1]}),
            Look("self.pool.ref_counts", "tables that hold blocks 0 to 4", [2, 1, 0, 0, 1]),
        ],
        at="return",
        when="request_id == 'r2'",
        commands=["p self.num_copies"],
    ),
    Stop(
        "the other one writes in place",
        BlockManager.append,
        "When r2/1 comes to write, the block is its own: one copy was enough for two completions.",
        [
            Look("(request_id, start, end)", "tokens to be written", ("r2/1", 6, 7)),
            Look("__return__", "copies to make", []),
        ],
        at="return",
        when="request_id == 'r2/1'",
        commands=["p self.owners"],
    ),
    Stop(
        "the copy is made before the forward",
        BlockCache.copy,
        "The scheduler only noted the copy in its plan. The runner makes it, in all layers, before "
        "the model runs.",
        [
            Look("copies", "(from, to)", [(1, 4)]),
            Look(
                "[torch.equal(self.keys[0][old], self.keys[0][new]) for old, new in copies]",
                "the same keys in both",
                [True],
            ),
        ],
        at="return",
        when="copies",
        commands=["u  execute(), with swaps and copies first"],
    ),
    Stop(
        "the bill",
        LLMEngine.generate,
        "Two completions of their own, from one computation of the prompt. All blocks are back.",
        [
            Look("[len(c.token_ids) for c in __return__[0].outputs]", "tokens each", [3, 3]),
            Look(
                "len({tuple(c.token_ids) for c in __return__[0].outputs})",
                "different completions",
                2,
            ),
            Look("self.stats()['copied_blocks']", "blocks copied", 1),
            Look("self.stats()['kv']['free']", "free blocks", 5),
        ],
        at="return",
        commands=["pp self.stats()", "pp self.tracer.records[-2].to_dict()"],
    ),
]


def scenario() -> None:
    """Two requests that do not fit together, then one prompt with two completions."""
    engine = LLMEngine(
        "tiny-llama",
        max_model_len=16,
        block_size=4,
        kv_cache_tokens=20,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    prompts = [[11, 12, 13, 14, 15, 16], [21, 22, 23, 24, 25, 26, 27]]
    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for num_tokens in (5, 7)
    ]
    engine.generate(prompts, params)
    two = SamplingParams(temperature=1, seed=1, max_tokens=3, ignore_eos=True, n=2)
    engine.generate([31, 32, 33, 34, 35, 36], two)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the walkthrough; returns the exit code."""
    return run_walkthrough(TITLE, INTRO, STOPS, scenario, argv)


if __name__ == "__main__":
    sys.exit(main())
