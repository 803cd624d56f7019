"""M5's walkthrough: steps that are launched before the tokens of the one before are known.

    python -m m5_kernels.walkthrough          stops in pdb, with a card at each stop
    python -m m5_kernels.walkthrough --auto   prints docs/transcripts/m5_walkthrough.txt

Two requests on a tiny model, with the kernels' torch twins on the CPU: one ends by its length, the
other by a stop token that nobody can foresee. `m5_kernels.walkthrough_flash_decode` is about a
kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import m4_prefix_chunked
from milestone_llm.engine.sampling_params import SamplingParams
from milestone_llm.models.tiny_models import build_tiny_model
from milestone_llm.walkthrough.runner import Look, Stop, run_walkthrough

from .engine import LLMEngine
from .runner import FusedRunner
from .scheduler import Scheduler

TITLE = "M5: a pipelined step"
INTRO = """
r0 has a prompt of 3 tokens and wants 4 more. r1 has 5 and would take 8, but the second token that
it will say is a stop token. (It is found out beforehand with M4; M5 is not told.)

On a GPU, Python needs up to a millisecond to plan a step and to take in its tokens. If the GPU
waited for that, it would be idle for a good part of each step. So step n+1 is planned and
launched while step n runs, though its tokens are not known yet.

Watch the -1 that stands for a token on its way, and what becomes of r1's last row.
"""
_LAST = "[r.token_ids[-1] for r in self.running]"
_COUNTS = "[(r.num_computed_tokens, r.num_tokens) for r in self.running]"

STOPS = [
    Stop(
        "nothing under way",
        LLMEngine._step,
        "The loop of M1 is schedule, execute, update. Here execute is cut in two, launch and "
        "collect, and between them lies the whole next call. The schedule is M4's; the model is "
        "a fused decoder that took over the Hugging Face model's weights.",
        [
            Look("self.is_pipelined", "no request needs the host to sample", True),
            Look("self._in_flight", "a step that was launched and not collected", None),
            Look(
                "type(self.scheduler).__mro__[1].__module__",
                "whose schedule",
                "m4_prefix_chunked.scheduler",
            ),
            Look("type(self.runner).__name__", "who computes", "FusedRunner"),
        ],
        commands=["ll  the two loops", "p self.decoder.config"],
    ),
    Stop(
        "state lives on the device",
        FusedRunner._send,
        "Each running request has a row of tensors on the device: tokens, length, block table, "
        "sampling parameters. The host sends what changed since the last step, in one transfer. "
        "At first that is all of it.",
        [
            Look("self.row_of", "row of each request", {"r0": 0, "r1": 1}),
            Look("step", "row, new tokens, whether it samples", [(0, 3, 1), (1, 5, 1)]),
            Look(
                "[state.rows.token_ids[row, :n].tolist() for row, n, _ in step]",
                "the device's copy of the tokens",
                [[11, 12, 13], [21, 22, 23, 24, 25]],
            ),
            Look("state.rows.num_computed_tokens.tolist()", "computed so far, by row", [0, 0]),
        ],
        at="return",
        commands=["p state.rows.block_table", "u  launch()"],
    ),
    Stop(
        "the step is launched",
        LLMEngine._launch,
        "On a GPU the kernels are queued by now, and nobody has waited. What comes back is a "
        "promise: who samples, and where the tokens will be. A step of decode rows alone is one "
        "CUDA graph, a single launch.",
        [
            Look("__return__.sampling", "which rows sample", [True, True]),
            Look("type(__return__.launched).__name__", "the promise", "LaunchedStep"),
        ],
        at="return",
        commands=["p __return__.launched.requests"],
    ),
    Stop(
        "the step is expected",
        Scheduler.expect,
        "So that the next step can be planned, this one counts as computed, and every row that "
        "samples gets a placeholder, -1, for the token that will come. The plan needs to know "
        "how many tokens there are, never which.",
        [
            Look(_COUNTS, "computed and known tokens", [(3, 4), (5, 6)]),
            Look(_LAST, "last tokens", [-1, -1]),
        ],
        at="return",
        commands=["ll"],
    ),
    Stop(
        "the first call gives nothing",
        LLMEngine._step,
        "Outputs come one call late. That is the price: a call of latency, of which a caller "
        "notices nothing, since the device was never idle.",
        [
            Look("__return__", "outputs", []),
            Look("self._in_flight is None", "nothing under way?", False),
        ],
        at="return",
        commands=["p self._in_flight.plan"],
    ),
    Stop(
        "the second step feeds tokens that the host has never seen",
        FusedRunner._send,
        "Each row is to compute one token. The host has -1 for it; the device has the real one, "
        "for the last kernel of a step appends what was sampled to the row. Hardly anything is "
        "sent: the rows of the step, and a block where one was added.",
        [
            Look("[row.request.token_ids[-1] for row in rows]", "what the host knows", [-1, -1]),
            Look(
                "[int(state.rows.token_ids[i, row.start]) >= 0 for i, row in enumerate(rows)]",
                "whether the device has a token there",
                [True, True],
            ),
            Look("state.rows.num_computed_tokens.tolist()", "computed so far, by row", [3, 5]),
            Look("step", "row, new tokens, whether it samples", [(0, 1, 1), (1, 1, 1)]),
        ],
        at="return",
        when="hits == 2",
        commands=["p state.rows.token_ids[:, :8]", "u"],
    ),
    Stop(
        "the first step is settled",
        Scheduler.settle,
        "Only now does the host wait for the tokens of step 0, while the device has step 1 to do. "
        "Placeholders become tokens; text, stop tokens and lengths are looked at as ever.",
        [
            Look(_COUNTS, "computed and known tokens", [(3, 4), (5, 6)]),
            Look("[r.token_ids[-1] >= 0 for r in self.running]", "real tokens?", [True, True]),
            Look("[len(output.token_ids) for output in __return__]", "outputs so far", [1, 1]),
        ],
        at="return",
        commands=["p sampled", "u  _settle(), which collected them"],
    ),
    Stop(
        "r1 turns out to have stopped",
        Scheduler.settle,
        "The third call has launched step 2, and now the tokens of step 1 are in: that of r1 is "
        "its stop token. It is finished as of step 1, and gets not one token more. But step 2 is "
        "under way, and r1 has a row in it.",
        [
            Look(
                "[(o.request_id, o.finish_reason) for o in __return__]",
                "why they ended",
                [("r0", None), ("r1", "stop")],
            ),
            Look("[r.request_id for r in self.running]", "who is left", ["r0"]),
            Look("self.kv.owners.keys() == {'r0'}", "are its blocks given back?", True),
        ],
        at="return",
        when="hits == 2",
        commands=["p finished"],
    ),
    Stop(
        "its row and its blocks go at once",
        FusedRunner.forget,
        "Somebody else may get them in the very next step, while the wasted row still writes its "
        "keys there. That is safe without any waiting: steps run one after another on the device, "
        "and whoever gets a block writes a slot before reading it.",
        [
            Look("self.row_of", "row of each request", {"r0": 0}),
            Look("self.free_rows", "rows for newcomers", [1]),
        ],
        at="return",
        when="request_id == 'r1'",
        commands=["w"],
    ),
    Stop(
        "nothing is expected of it",
        Scheduler.expect,
        "Step 2 was launched with both rows. r0 gets a placeholder, r1 is finished and is left "
        "alone.",
        [
            Look(
                "[(row.request.request_id, row.request.is_finished) for row in plan.rows]",
                "rows of the step under way",
                [("r0", False), ("r1", True)],
            ),
            Look(_LAST, "last tokens of who runs", [-1]),
        ],
        at="return",
        when="hits == 3",
        commands=["p plan.rows[1].request.token_ids"],
    ),
    Stop(
        "no row for a length that is known",
        Scheduler.is_decoding,
        "r0 has three tokens and a placeholder, and wanted four. That can be known without the "
        "token, so it gets no row too many. Only an end that depends on what a token is - EOS, a "
        "stop token, a stop string - wastes a row.",
        [
            Look("request.num_output_tokens", "outputs, the placeholder included", 4),
            Look("__return__", "does it get a row?", False),
        ],
        at="return",
        when="request.num_output_tokens == 4",
        commands=["ll"],
    ),
    Stop(
        "the bill",
        LLMEngine.stats,
        "Four steps and one wasted row, which the trace calls padding. On a GPU such a row costs "
        "what any row costs in a step that would have been run anyway; waiting for the host in "
        "every step would cost far more.",
        [
            Look("__return__['steps']", "steps", 4),
            Look("__return__['padding_tokens']", "rows computed for nobody", 1),
            Look(
                "[[f'{row.request_id} {row.phase}' for row in record.batch] "
                "for record in self.tracer.records]",
                "rows of every step",
                [
                    ["r0 prefill", "r1 prefill"],
                    ["r0 decode", "r1 decode"],
                    ["r0 decode", "r1 padding"],
                    ["r0 decode"],
                ],
            ),
            Look("__return__['kv']['used']", "blocks in use", 0),
        ],
        at="return",
        commands=["pp self.tracer.records[2].to_dict()"],
    ),
]
PROMPTS = [[11, 12, 13], [21, 22, 23, 24, 25]]


def scenario() -> None:
    """Two requests, of which the second stops at its second token."""
    model = build_tiny_model("llama")
    limits: dict[str, Any] = {"max_num_seqs": 2, "max_model_len": 32, "block_size": 4}
    params: dict[str, Any] = {"temperature": 0, "ignore_eos": True}
    oracle = m4_prefix_chunked.LLMEngine(model, **limits)
    told = oracle.generate(PROMPTS[1], SamplingParams(max_tokens=2, **params))[0].token_ids
    engine = LLMEngine(model, trace="memory", **limits)
    engine.add_request(PROMPTS[0], SamplingParams(max_tokens=4, **params))
    engine.add_request(PROMPTS[1], SamplingParams(max_tokens=8, stop_token_ids=[told[1]], **params))
    while engine.has_unfinished_requests():
        engine.step()
    engine.stats()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the walkthrough; returns the exit code."""
    return run_walkthrough(TITLE, INTRO, STOPS, scenario, argv)


if __name__ == "__main__":
    sys.exit(main())
