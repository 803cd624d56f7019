"""M1's walkthrough: a static batch from `generate` to a finished row that still pads the batch.

    python -m m1_single.walkthrough          stops in pdb, with a card at each stop
    python -m m1_single.walkthrough --auto   prints docs/transcripts/m1_walkthrough.txt

Three requests of 3, 5 and 4 tokens want 2, 5 and 2 more, on a tiny model with random weights.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from milestone_llm.engine.engine import LLMEngine
from milestone_llm.engine.sampling_params import SamplingParams
from milestone_llm.walkthrough.runner import Look, Stop, run_walkthrough

from .runner import ModelRunner
from .scheduler import Scheduler

TITLE = "M1: a static batch, step by step"
INTRO = """
Three requests come to an engine that computes two at a time (max_num_seqs=2). Their prompts have
3, 5 and 4 tokens, and they want 2, 5 and 2 tokens of output. The model is a tiny llama with
random weights: what it says is noise, how it is served is not.

Watch two numbers: how many positions are computed for nobody, and how long r2 waits while the
row of r0 has nothing left to do.
"""

_BATCH = Look("[r.request_id for r in self.batch]", "rows of the static batch", ["r0", "r1"])
_QUEUE = "[r.request_id for r in self.waiting]"

STOPS = [
    Stop(
        "three prompts come in",
        LLMEngine.generate,
        "This is all a user sees: prompts in, outputs out. generate() makes a Request of each "
        "prompt, queues them, and goes on step by step until all of them are finished.",
        [
            Look("[len(prompt) for prompt in prompts]", "prompt lengths, in tokens", [3, 5, 4]),
            Look("[p.max_tokens for p in sampling_params]", "tokens wanted", [2, 5, 2]),
            Look("self.config.max_num_seqs", "most requests that one step computes", 2),
        ],
        commands=["a  the arguments", "l  the source around here", "c  on to the next stop"],
    ),
    Stop(
        "the loop of every milestone",
        LLMEngine._step,
        "One step is schedule, execute, update, record. The scheduler decides what to compute and "
        "knows no tensors; the runner computes and knows no queues. Later milestones replace the "
        "two, never this loop.",
        [
            Look(
                "[r.request_id for r in self.scheduler.waiting]",
                "the queue, first come first served",
                ["r0", "r1", "r2"],
            ),
            Look("self.scheduler.batch", "nothing runs yet", []),
        ],
        commands=["w  who called us", "ll  the whole step"],
    ),
    Stop(
        "a batch is formed",
        Scheduler._form_batch,
        "Requests join while there is a free row and the padded batch fits in one step. Then the "
        "door closes: nobody joins until the last row is done. r2 came at the same time as the "
        "others and waits.",
        [
            _BATCH,
            Look(_QUEUE, "left outside", ["r2"]),
            Look("longest", "the longest prompt: all rows will be this wide", 5),
        ],
        at="return",
        commands=["ll  the loop that filled the batch", "p self.config.max_num_seqs"],
    ),
    Stop(
        "the plan of the first step",
        Scheduler.schedule,
        "A plan says for each row where it starts and how many tokens it computes. The rows start "
        "at 0 with their whole prompt, which people call prefill. A tensor is a rectangle, so the "
        "shorter prompt costs as much as the longer one: the first waste.",
        [
            Look(
                "[(row.phase, row.start, row.num_new_tokens) for row in __return__.rows]",
                "what the step computes of r0 and r1",
                [("prefill", 0, 3), ("prefill", 0, 5)],
            ),
            Look("__return__.num_padding_tokens", "positions computed for nobody", 2),
            Look("self.batch_width", "columns of the batch, in tokens", 5),
        ],
        at="return",
        commands=["pp __return__.rows[0]"],
    ),
    Stop(
        "prompts padded on the left",
        ModelRunner._start_batch,
        "Padding goes to the left, so that the last token of every prompt is in the last column: "
        "its logits give the next token, and the next column is free for it. The attention mask "
        "hides the padding from the real tokens.",
        [
            Look(
                "__return__.tolist()",
                "input_ids: 0 is padding",
                [[0, 0, 11, 12, 13], [21, 22, 23, 24, 25]],
            ),
            Look(
                "self.attention_mask.tolist()",
                "0 is masked out",
                [[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]],
            ),
        ],
        at="return",
        commands=["u  execute(), which goes on with them", "ll"],
    ),
    Stop(
        "the forward pass is done",
        ModelRunner.execute,
        "A token's position counts the real tokens before it, not the columns: 11 is at position 0 "
        "though it stands in column 2. Hugging Face's cache now holds keys and values of all "
        "columns, padding included. Only the last column's logits are needed, one row a request.",
        [
            Look(
                "position_ids.tolist()",
                "positions of the columns",
                [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]],
            ),
            Look("self.past_key_values.get_seq_length()", "columns in the KV cache", 5),
            Look("tuple(logits.shape)", "[rows that sample, vocabulary]", (2, 199)),
            Look("sorted(__return__)", "who got a token", ["r0", "r1"]),
        ],
        at="return",
        commands=["pp __return__  the tokens", "p logits.argmax(-1)  greedy sampling took these"],
    ),
    Stop(
        "tokens are handed out",
        Scheduler.update,
        "Each request has one more token, and its prompt counts as computed. The new token's keys "
        "and values are not in the cache yet: known tokens are one ahead of computed ones, and "
        "that one is what the next step computes.",
        [
            Look(
                "[(r.num_computed_tokens, r.num_tokens) for r in self.running]",
                "computed and known tokens of r0 and r1",
                [(3, 4), (5, 6)],
            ),
            Look(
                "[len(output.token_ids) for output in __return__]",
                "output tokens so far, as the caller gets them",
                [1, 1],
            ),
        ],
        at="return",
        commands=["p self.running[0].output_token_ids"],
    ),
    Stop(
        "a decode step feeds one column",
        ModelRunner._extend_batch,
        "The second step computes one token a row: the one just sampled. The cache knows the "
        "rest, so a step reads all weights to compute two positions. The mask grows by a "
        "column of ones.",
        [
            Look("tuple(__return__.shape)", "[rows, columns] of input_ids", (2, 1)),
            Look(
                "__return__[:, 0].tolist() == [row.request.token_ids[-1] for row in plan.rows]",
                "each row is fed its own last token",
                True,
            ),
            Look(
                "self.attention_mask.tolist()",
                "the mask is six columns wide now",
                [[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]],
            ),
        ],
        at="return",
        commands=["p __return__"],
    ),
    Stop(
        "r0 has all its tokens",
        Scheduler.update,
        "r0 wanted two tokens and has them: it is finished, and its output could go to the user. "
        "Yet its row stays in the batch, since a row cannot leave the rectangle. r2 could use it, "
        "and waits.",
        [
            Look("self.batch[0].finish_reason", "why r0 ended", "length"),
            Look("[r.request_id for r in self.running]", "who still needs tokens", ["r1"]),
            _BATCH,
            Look(_QUEUE, "who waits", ["r2"]),
        ],
        at="return",
        when="hits == 2",
        commands=["p self.batch[0].output_token_ids"],
    ),
    Stop(
        "a finished row pads the batch",
        Scheduler.schedule,
        "The third step plans two rows for one token. The row of r0 is labelled padding: it "
        "computes a position that nobody will read, and samples nothing. This is the second "
        "waste, and it grows with the difference in output lengths.",
        [
            Look(
                "[(row.request.request_id, row.phase) for row in __return__.rows]",
                "the rows of the step",
                [("r0", "padding"), ("r1", "decode")],
            ),
            Look("[row.samples for row in __return__.rows]", "which rows sample", [False, True]),
            Look("__return__.num_padding_tokens", "positions computed for nobody", 1),
        ],
        at="return",
        when="hits == 3",
        commands=["w", "pp __return__.rows[0]"],
    ),
    Stop(
        "the model computes it all the same",
        ModelRunner.execute,
        "The model was given both rows; that one of them is dead, it cannot know. Two rows in, "
        "one token out: half of this step's work is lost. r0 is fed its last token once more.",
        [
            Look("tuple(input_ids.shape)", "[rows, columns] of input_ids", (2, 1)),
            Look("self.past_key_values.get_seq_length()", "columns in the cache, for both rows", 7),
            Look("sorted(__return__)", "who got a token", ["r1"]),
        ],
        at="return",
        when="hits == 3",
        commands=["p input_ids", "p plan.rows[0].request.token_ids"],
    ),
    Stop(
        "the last row is done",
        Scheduler._release,
        "r1 has its fifth token. Only now, with nobody left running, is the whole batch given "
        "back, and r2 may come in: the row of r0 was idle for three steps.",
        [
            Look("self.batch", "no row is taken", []),
            Look("self.batch_width", "columns of the batch", 0),
            Look(_QUEUE, "who waits", ["r2"]),
        ],
        at="return",
        when="not self.running",
        commands=["u  update(), which found r1 finished", "p finished[0].output_token_ids", "d"],
    ),
    Stop(
        "r2 is admitted at last",
        Scheduler._form_batch,
        "The sixth step forms a new batch, of r2 alone: one row where two would fit. Had r2 taken "
        "the row of r0 in the third step, it would be done by now. That is what m2_batching does.",
        [
            Look("[r.request_id for r in self.batch]", "rows of the new batch", ["r2"]),
            Look(_QUEUE, "who waits", []),
        ],
        at="return",
        when="hits == 2",
        commands=["u", "u  _step(), with its step count", "p self._counts"],
    ),
    Stop(
        "the bill",
        LLMEngine.generate,
        "Outputs come back in the order of the prompts, whenever they were done. The trace shows "
        "where the work went: 18 of 23 computed positions were somebody's. With outputs of 10 "
        "and 100 tokens instead of 2 and 5, the share is far worse.",
        [
            Look("[len(output.token_ids) for output in __return__]", "tokens each", [2, 5, 2]),
            Look(
                "[' '.join(row.phase for row in record.batch) for record in self.tracer.records]",
                "what the rows of each step were",
                [
                    "prefill prefill",
                    "decode decode",
                    "padding decode",
                    "padding decode",
                    "padding decode",
                    "prefill",
                    "decode",
                ],
            ),
            Look("self.stats()['padding_tokens']", "left padding 2, dead rows 3", 5),
            Look("round(self.stats()['useful_share'], 2)", "share that was somebody's", 0.78),
        ],
        at="return",
        commands=["pp self.stats()", "pp self.tracer.records[2].to_dict()"],
    ),
]


def scenario() -> None:
    """Three requests on an engine that computes two at a time."""
    engine = LLMEngine(
        "tiny-llama",
        max_num_seqs=2,
        max_model_len=64,
        device="cpu",
        dtype="float32",
        trace="memory",
    )
    prompts = [[11, 12, 13], [21, 22, 23, 24, 25], [31, 32, 33, 34]]
    params = [
        SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
        for num_tokens in (2, 5, 2)
    ]
    engine.generate(prompts, params)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the walkthrough; returns the exit code."""
    return run_walkthrough(TITLE, INTRO, STOPS, scenario, argv)


if __name__ == "__main__":
    sys.exit(main())
