"""Answers to long prompts begin in the middle of nowhere."""

from __future__ import annotations

from milestone_llm.core.plan import ScheduledRequest

from .exhibit import UNCHECKED, UNCHECKED_SETTING, Arrival, Exhibit, greedy
from .invariants import positions_are_sampled_once


def post_init(self: ScheduledRequest) -> None:
    """Give every row a token, except padding."""
    self.sampling_requests = [] if self.is_padding else [self.request]


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="milestone_llm.core.plan.ScheduledRequest.__post_init__",
    broken=post_init,
    traffic=[
        Arrival(0, "short", [7, 77, 107], greedy(4)),
        Arrival(0, "long", list(range(50, 68)), greedy(4)),
    ],
    invariant=positions_are_sampled_once,
    both=UNCHECKED,
    setting=UNCHECKED_SETTING,
    config={"max_num_batched_tokens": 12},
    text="""
question: `long` wants four tokens and gets four. Which of its rows had any business to sample
  one? Who decides that a row samples, and which two numbers must be compared for it? (It is not in
  the scheduler's file.)
cause: Every row samples. A chunk that ends inside the prompt has a next token already: the
  prompt's. The sampled one is appended to what is known, after the prompt, and counts as
  output. (If `_add_row` cut a row that was made for the whole prompt, the trace would be the same:
  that answer counts.)
invariant: Only the row that reaches the last known token samples. So the token of each position
  is sampled once.
fix: A row samples if its end is the number of known tokens.
test:
  tests/m4/test_chunks.py::test_a_row_that_stops_short_of_the_last_known_token_samples_nothing
seen: A row that had nothing to compute in a step was sampled with the others, from a hidden
  state of zeros: the text was full of token 0, an exclamation mark.
threads: tenstorrent/tt-xla#5830 (closed)
""",
    walk="""
return exercises/museum/tokens_too_many.py::post_init, when self.request.request_id ==
  'long'
The first chunk of `long` becomes a row.
p (self.end, self.request.num_tokens)  # it ends here; so many tokens are known
p len(self.sampling_requests)  # who gets a token behind it
Try `u`: with the budget the chunk got its length.
""",
)
