"""With guesses on, an answer goes on after its stop token. Not always."""

from __future__ import annotations

from dataclasses import replace

from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.outputs import EngineCoreOutput, SampledToken
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, greedy
from .invariants import tokens_end_at_stop

PROMPT = [7, 77, 107, 140, 107]  # the answer begins with 140 107 63
original = Scheduler._append


def _append(self: Scheduler, request: Request, sampled: list[SampledToken]) -> EngineCoreOutput:
    """Append the accepted draft tokens to a request, then its new token, which may be the last."""
    accepted = [token.token_id for token in sampled[:-1]]
    request.token_ids += accepted
    request.num_in_flight -= len(accepted)
    output = original(self, request, sampled[-1:])
    return replace(output, new_token_ids=accepted + output.new_token_ids)


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.scheduler.Scheduler._append",
    broken=_append,
    traffic=[
        Arrival(0, "a", PROMPT, greedy(5, stop_token_ids=[107])),
        Arrival(0, "b", PROMPT, greedy(5, stop_token_ids=[63])),
    ],
    invariant=tokens_end_at_stop,
    config={"speculation": "ngram", "enable_prefix_caching": False},
    text="""
question: a should end with token 107, and b with 63. Their prompts are equal, and so are their
  rows in step 1. b ends there and a does not.
cause: A row with guesses gives several tokens. Only the last of them is asked whether it ends the
  request. a's stop token was a guess that came true, with one more token after it; b's stop token
  was the last.
invariant: No token comes after a stop token, however many a step brings.
fix: Take tokens one by one, in order, and stop at the first that ends the request. What came
  after it was computed in vain.
test: tests/m4/test_speculation.py::test_what_was_accepted_behind_a_stop_token_is_dropped
seen: Engines looked at the last accepted token alone, or at the length first.
threads: huggingface/transformers#47912 (closed), sgl-project/sglang#33758 (merged),
  sgl-project/sglang#23802 (merged)
""",
    walk="""
call exercises/museum/past_the_end.py::_append, when len(sampled) > 1
Guesses have come true.
p [token.token_id for token in sampled]  # what the row brings, in order
p sorted(request.stop_token_ids)  # what ends this request
Try `n` until the first of them is in `request.token_ids`. Who asks whether it was the last?
""",
)
