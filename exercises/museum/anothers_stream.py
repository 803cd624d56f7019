"""A user who asked for a recipe reads half a love letter."""

from __future__ import annotations

from milestone_llm.frontend.output_processor import OutputQueue
from milestone_llm.frontend.outputs import RequestOutput

from .exhibit import Arrival, Exhibit, Run, greedy, take
from .invariants import callers_get_all

ARRIVED: dict[str, RequestOutput] = {}
original = OutputQueue.__init__


def init(self: OutputQueue, wants_all: bool = True) -> None:
    """Make the queue of a call of `generate` or `stream`."""
    original(self, wants_all)
    self._outputs = ARRIVED


def two_readers(exhibit: Exhibit, run: Run) -> None:
    """Serve two callers of `stream`, which take turns. Each keeps the newest output that it got."""
    streams = {
        each.name: run.engine.stream(run.prompt(each), each.params) for each in exhibit.traffic
    }
    while streams:
        for name, stream in list(streams.items()):
            output = next(stream, None)
            if output is None:
                del streams[name]
            else:
                run.tokens[name], run.texts[name] = output.token_ids, output.text
            take(run, [])


EXHIBIT = Exhibit(
    milestone="m3_paged",
    place="milestone_llm.frontend.output_processor.OutputQueue.__init__",
    broken=init,
    serve=two_readers,
    traffic=[
        Arrival(0, "r0", [23, 42, 17], greedy(4)),
        Arrival(0, "r1", [7, 77, 107], greedy(6)),
    ],
    invariant=callers_get_all,
    ask="",
    setting="Two callers of `stream` take turns. Each keeps the newest output that it was given.",
    text="""
question: The trace is that of a correct engine: scheduler, blocks and model are innocent. Look
  at the tokens that r0's caller got. Which of the two should have got them, and through whose
  hands did they go?
cause: All calls of `stream` keep their outputs in one and the same dict. Whoever takes first
  gets what came for the others, too: r0's caller got its own outputs and r1's by turns, and the
  last was one of r1's.
invariant: Every output has one reader: what was sampled for a request is what its caller gets.
fix: A queue for each caller, made with the call.
test: tests/milestones/test_stream.py::test_two_streams_read_in_turn_both_see_every_token
seen: Readers shared one queue of results: who read first took all, and the tokens of the others
  were lost.
threads: huggingface/transformers#39149 (merged), huggingface/transformers#40479 (merged),
  huggingface/transformers#42943 (open)
""",
    walk="""
return exercises/museum/anothers_stream.py::init, when hits > 1
A second caller gets its queue.
p self._outputs is ARRIVED  # whose dict it is
Try `c`: the caller of r0 is served with what came for r1.
""",
)
