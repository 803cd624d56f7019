"""Short answers are right. A long one is right for a while, and then it has another word."""

from __future__ import annotations

from m4_prefix_chunked.hybrid import group_blocks
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, greedy
from .invariants import seen_blocks_are_held

LONG = [61, 97, 99, 35, 52, 14, 24, 38, 66, 132, 56, 105, 10, 120, 127, 119, 102, 129, 149]
original = group_blocks.certain_start


def certain_start(request: Request) -> int:
    """Return the first token that a request may still compute after this step."""
    return original(request) + 1


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.hybrid.group_blocks.certain_start",
    broken=certain_start,
    traffic=[
        Arrival(0, "long", LONG, greedy(14)),
        Arrival(0, "short", [52, 106, 25, 127, 62, 8], greedy(6)),
    ],
    invariant=seen_blocks_are_held,
    config={
        "block_size": 8,
        "enable_prefix_caching": False,
        "disable_hybrid_kv_cache_manager": False,
    },
    family="gemma3",
    setting="One layer sees all tokens. Two layers see the last 24, that of the row included; each "
    "is a group, and a row has a block table for each group.",
    text="""
question: In which step does a group give its first block back? Which token does the row of that
  step compute, and which tokens does it see?
cause: A block goes back when the token that the step samples does not see it. But the step
  computes the token before that one, which still sees a token more. It reads zeros there, and
  so one token in eight is computed without the oldest key of its window.
invariant: A row has every block that its first token sees, in each group of layers.
fix: Count from the first token that the step computes. If drafts are in flight, count from the
  first that may be computed again.
test:
  tests/m4/test_hybrid.py::test_a_block_goes_back_in_the_step_whose_token_is_the_first_not_to_see_it
seen: A cache for sliding windows kept as many tokens as the window has, and computed several at
  once. The first of them had lost what it should see.
threads: rasbt/LLMs-from-scratch#1008 (closed)
""",
    walk="""
call exercises/museum/one_token_early.py::certain_start, when request.num_computed_tokens == 30
This step computes token 30 of the long request, and samples token 31.
p original(request)  # the first token that it computes
p (30 - 23, 31 - 23)  # the first token that 30 sees, and that 31 sees
p (7 // 8, 8 // 8)  # and in which entries of a table these are
Try `u`: give_back takes the block of entry 0 away, and token 30 sees token 7 in it.
""",
)
