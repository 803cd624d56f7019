"""M2's walkthrough: what `schedule` decides, and what the model gets to see of it.

    python -m m2_batching.walkthrough          stops in pdb, with a card at each stop
    python -m m2_batching.walkthrough --auto   prints docs/transcripts/m2_walkthrough.txt

The three requests of M1's walkthrough on as many rows, and two that come while these run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from m1_single import SamplingParams
from milestone_llm.walkthrough.runner import Look, Stop, run_walkthrough

from .attention import AttentionMetadata, slot_attention
from .engine import LLMEngine
from .runner import ModelRunner
from .scheduler import Scheduler

TITLE = "M2: who runs is decided at every step"
INTRO = """
The three requests of M1's walkthrough come again, to an engine with two rows (max_num_seqs=2):
prompts of 3, 5 and 4 tokens, outputs of 2, 5 and 2. There they took seven steps and 23 positions,
five of them padding. A step computes at most nine tokens here (max_num_batched_tokens=9).

After the third step two more arrive: r3 with a prompt of nine tokens, and r4 with one of two.

Watch what each request is told when it asks to join a step, and which slot it gets.
"""

_RUNNING = "[r.request_id for r in self.running]"
_QUEUE = "[r.request_id for r in self.waiting]"
_ROWS = "[(r.request.request_id, r.phase, r.start, r.num_new_tokens) for r in __return__.rows]"
_PHASES = "[[f'{row.request_id} {row.phase}' for row in record.batch] for record in %s]"

STOPS = [
    Stop(
        "the loop is M1's",
        LLMEngine._step,
        "Schedule, execute, update, record: not a line of the loop differs from M1. What differs "
        "is whom it asks: m2_batching.engine builds another scheduler and another runner.",
        [
            Look("type(self.scheduler).__module__", "who decides", "m2_batching.scheduler"),
            Look("type(self.runner).__module__", "who computes", "m2_batching.runner"),
            Look(
                "[r.request_id for r in self.scheduler.waiting]",
                "the queue, first come first served",
                ["r0", "r1", "r2"],
            ),
        ],
        commands=["w  who called us", "ll  the whole step"],
    ),
    Stop(
        "may r0 join?",
        Scheduler.reason_to_wait,
        "The head of the queue is asked for a reason to wait, and each limit is looked at in "
        "turn: rows (max_num_seqs), tokens of this step (the budget), KV memory (a free slot). "
        "None means that there is no such reason.",
        [
            Look("request.request_id", "who asks", "r0"),
            Look("(len(self.running), self.config.max_num_seqs)", "rows taken, rows there", (0, 2)),
            Look("(request.num_tokens, budget)", "tokens it needs, tokens left", (3, 9)),
            Look("self.kv.free_slots", "KV slots that nobody owns", [0, 1]),
            Look("__return__", "the reason to wait", None),
        ],
        at="return",
        commands=["ll  the three tests", "u  _admit(), which asks on until there is a reason"],
    ),
    Stop(
        "r0 gets a slot and a row",
        Scheduler._start,
        "To be admitted is to own a slot: room for max_model_len tokens, though r0 will store "
        "only four. The row says what the step computes: from token 0 on, three of them.",
        [
            Look("self.kv.owners", "slot of each request", {"r0": 0}),
            Look("self.max_model_len", "tokens reserved by a slot", 64),
            Look(
                "(__return__.start, __return__.num_new_tokens, __return__.blocks)",
                "first token, number of tokens, slot",
                (0, 3, [0]),
            ),
        ],
        at="return",
        commands=["pp __return__", "p self.running"],
    ),
    Stop(
        "r2 is told why it waits",
        Scheduler.reason_to_wait,
        "r0 and r1 are in, and there is no third row. The other limits would say no as well: one "
        "token of the budget is left, and no slot. There are as many slots as rows, so the "
        "test for memory never decides in M2; it does in M3, where memory is counted in blocks.",
        [
            Look("__return__", "the reason to wait", "max_num_seqs=2 requests are running"),
            Look("budget", "tokens left: 9 - 3 - 5", 1),
            Look("self.kv.free_slots", "KV slots that nobody owns", []),
        ],
        at="return",
        when="request.request_id == 'r2'",
        commands=["p request", "u"],
    ),
    Stop(
        "the first plan",
        Scheduler.schedule,
        "Two rows of different length, and no padding: nothing makes a rectangle of them. This "
        "step is the same as M1's first, except that eight positions are computed and not ten.",
        [
            Look(
                _ROWS,
                "id, phase, start, tokens",
                [("r0", "prefill", 0, 3), ("r1", "prefill", 0, 5)],
            ),
            Look("__return__.num_padding_tokens", "positions computed for nobody", 0),
        ],
        at="return",
        commands=["pp __return__.rows[0]"],
    ),
    Stop(
        "one flat batch",
        AttentionMetadata.build,
        "Both prompts go through the model as one sequence of eight tokens. Linear layers, norms "
        "and the MLP do not care: they look at one token at a time. Only attention must know "
        "whose token is whose, and this is what it is told.",
        [
            Look("__return__.token_slots.tolist()", "whose slot", [0, 0, 0, 1, 1, 1, 1, 1]),
            Look("__return__.token_positions.tolist()", "where in it", [0, 1, 2, 0, 1, 2, 3, 4]),
            Look("__return__.prefill_spans", "which tokens attend to each other", [(0, 3), (3, 8)]),
            Look("__return__.decode_slots.tolist()", "slots that decode", []),
        ],
        at="return",
        commands=["u  attention_metadata(), called by execute()", "u", "ll"],
    ),
    Stop(
        "inside layer 0",
        slot_attention,
        "Hugging Face's own decoder layer calls this in place of its attention. The batch is one "
        "row of eight tokens; there are four query heads and two KV heads, not repeated (GQA). "
        "There is no mask: the metadata, handed through model(...), replaces it.",
        [
            Look("tuple(query.shape)", "[1, heads, tokens, head_dim]", (1, 4, 8, 16)),
            Look("tuple(key.shape)", "[1, KV heads, tokens, head_dim]", (1, 2, 8, 16)),
            Look("attention_mask", "what Hugging Face would have masked", None),
            Look("module.layer_idx", "layer", 0),
        ],
        commands=["w  from execute() through transformers to here", "ll"],
    ),
    Stop(
        "r0 leaves in the step that finishes it",
        Scheduler._release,
        "The second step has decoded both rows, and r0 has its two tokens. It leaves in the same "
        "step, and its slot goes back to the free ones. Nothing is erased: what r0 stored is "
        "there until somebody else writes over it.",
        [
            Look("[r.request_id for r in finished]", "who is done", ["r0"]),
            Look(_RUNNING, "who goes on", ["r1"]),
            Look("self.kv.free_slots", "KV slots that nobody owns", [0]),
            Look(_QUEUE, "who waits", ["r2"]),
        ],
        at="return",
        when="finished",
        commands=["u  update(), which M2 takes from M1", "p finished[0].output_token_ids"],
    ),
    Stop(
        "r2 asks again",
        Scheduler.reason_to_wait,
        "The third step gives r1 its token first: running requests come before waiting ones. "
        "Eight tokens are left, a row is free and a slot, so r2 may join. In M1 this was the "
        "step in which the dead row of r0 was computed for the first time.",
        [
            Look("request.request_id", "who asks", "r2"),
            Look("budget", "tokens left: 9 - 1", 8),
            Look("__return__", "the reason to wait", None),
        ],
        at="return",
        when="len(self.running) == 1",
        commands=["p [r.request_id for r in self.running]"],
    ),
    Stop(
        "the slot of r0 is used again",
        Scheduler._start,
        "r2 gets the lowest free slot, which was r0's one step ago. Low slots first keeps the "
        "used ones close together, so that attention can read them as one slice.",
        [
            Look("self.kv.owners", "slot of each request", {"r1": 1, "r2": 0}),
            Look("__return__.blocks", "slot of the new row", [0]),
            Look(
                "[(e.type, e.request_id) for e in self.kv.events]",
                "for the trace",
                [("alloc", "r2")],
            ),
        ],
        at="return",
        when="request.request_id == 'r2'",
        commands=["p self.kv.watermark  most slots ever used"],
    ),
    Stop(
        "prefill and decode in one step",
        Scheduler.schedule,
        "r1 computes one token and r2 four. The scheduler makes no difference between the two: "
        "each row computes the known tokens whose KV is not there yet. Prefill and decode are "
        "names for what comes of it.",
        [
            Look(
                _ROWS, "id, phase, start, tokens", [("r1", "decode", 6, 1), ("r2", "prefill", 0, 4)]
            ),
            Look("[row.samples for row in __return__.rows]", "which rows sample", [True, True]),
            Look("__return__.num_tokens", "tokens of the step", 5),
        ],
        at="return",
        when="hits == 3",
        commands=["pp __return__.rows"],
    ),
    Stop(
        "two kinds of rows for attention",
        AttentionMetadata.build,
        "Decode rows stand first, so that their tokens are one slice. The prefill row attends to "
        "itself; the decode row looks into its slot, where seven tokens will be, its own included.",
        [
            Look("__return__.token_slots.tolist()", "whose slot", [1, 0, 0, 0, 0]),
            Look("__return__.token_positions.tolist()", "where in it", [6, 0, 1, 2, 3]),
            Look("__return__.decode_slots.tolist()", "slots that decode", [1]),
            Look("__return__.decode_context_lens.tolist()", "tokens they attend to", [7]),
            Look("__return__.prefill_spans", "tokens of the prefill row", [(1, 5)]),
        ],
        at="return",
        when="hits == 3",
        commands=["p __return__.is_dense  are most of the slots read?", "u", "u"],
    ),
    Stop(
        "the price of one call for all decode rows",
        AttentionMetadata.decode_mask,
        "All decode rows share one attention call, which reads the slots where they lie, up to "
        "the longest context. So slot 0 is read too, and its result thrown away: it sees one "
        "position, since a softmax over none is not a number. That is what M2 gives up.",
        [
            Look("tuple(__return__.shape)", "[slots, 1, 1, longest context]", (2, 1, 1, 7)),
            Look(
                "__return__[:, 0, 0].int().tolist()",
                "what each slot's query may see",
                [[1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1]],
            ),
        ],
        at="return",
        when="self.prefill_spans and len(self.decode_slots)",
        commands=["p self.decode_slots", "u  _decode(), which uses the mask", "ll"],
    ),
    Stop(
        "both rows have a token",
        ModelRunner.execute,
        "Only the last token of each row goes through the LM head (logits_to_keep): two of five. "
        "One forward gave r1 its third token and r2 its first.",
        [
            Look("sorted(__return__)", "who got a token", ["r1", "r2"]),
            Look("plan.num_tokens", "tokens computed", 5),
        ],
        at="return",
        when="hits == 3",
        commands=["pp __return__", "p output.logits.shape  [1, rows that sample, vocabulary]"],
    ),
    Stop(
        "r3 arrives while others decode",
        Scheduler.add,
        "Between two steps a request arrives. It is put into the queue and no more: nothing is "
        "stopped for it, and the next call of schedule() will ask whether it may join.",
        [
            Look("(request.request_id, request.num_prompt_tokens)", "who comes", ("r3", 9)),
            Look(_RUNNING, "who runs", ["r1", "r2"]),
        ],
        when="self.running",
        commands=["u  _enqueue()", "u  add_request(), called between two steps"],
    ),
    Stop(
        "r3 needs a whole step for itself",
        Scheduler.reason_to_wait,
        "The fourth step had no row free. In the fifth there is a row and a slot, but r1 takes "
        "one of nine tokens, and a prompt is computed in one piece: it waits for a step in which "
        "nobody else runs. m4_prefix_chunked cuts prompts into chunks.",
        [
            Look("(len(self.running), self.config.max_num_seqs)", "rows taken, rows there", (1, 2)),
            Look("self.kv.free_slots", "KV slots that nobody owns", [0]),
            Look("__return__", "the reason to wait", "it needs 9 tokens, the step has 8 left"),
        ],
        at="return",
        when="request.request_id == 'r3' and len(self.running) == 1",
        commands=["p request.num_tokens, budget"],
    ),
    Stop(
        "nobody overtakes",
        Scheduler.schedule,
        "r4 has two tokens and would fit into the fifth step. It waits behind r3 all the same: if "
        "small requests could pass, a stream of them would keep a large one out for ever.",
        [
            Look(_ROWS, "id, phase, start, tokens", [("r1", "decode", 8, 1)]),
            Look(_QUEUE, "who waits", ["r3", "r4"]),
        ],
        at="return",
        when="hits == 5",
        commands=["ll", "p self.config.policy"],
    ),
    Stop(
        "the bill",
        LLMEngine.stats,
        "The requests of M1's walkthrough are done after five steps, not seven, and 18 positions, "
        "not 23. r2 has its first token in the third step instead of the sixth. The other two "
        "steps are for r3 and r4. Below, see how little of the reserved KV memory is used.",
        [
            Look(
                _PHASES % "self.tracer.records[:5]",
                "rows of the first five steps",
                [
                    ["r0 prefill", "r1 prefill"],
                    ["r0 decode", "r1 decode"],
                    ["r1 decode", "r2 prefill"],
                    ["r1 decode", "r2 decode"],
                    ["r1 decode"],
                ],
            ),
            Look(
                _PHASES % "self.tracer.records[5:]",
                "rows of the last two",
                [["r3 prefill"], ["r3 decode", "r4 prefill"]],
            ),
            Look("__return__['padding_tokens']", "positions computed for nobody", 0),
            Look(
                "[(r.kv.stored_tokens, r.kv.reserved_tokens) for r in self.tracer.records]",
                "KV after each step: stored, reserved",
                [(8, 128), (6, 64), (11, 128), (8, 64), (0, 0), (9, 64), (0, 0)],
            ),
        ],
        at="return",
        commands=["pp __return__", "pp self.tracer.records[2].to_dict()"],
    ),
]


def scenario() -> None:
    """Three requests at the start and two after the third step."""
    engine = LLMEngine(
        "tiny-llama",
        max_num_seqs=2,
        max_num_batched_tokens=9,
        max_model_len=64,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    for prompt, num_tokens in (([11, 12, 13], 2), ([21, 22, 23, 24, 25], 5), ([31, 32, 33, 34], 2)):
        engine.add_request(prompt, _exactly(num_tokens))
    for _ in range(3):
        engine.step()
    engine.add_request([41, 42, 43, 44, 45, 46, 47, 48, 49], _exactly(2))
    engine.add_request([51, 52], _exactly(1))
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
