"""Under load the engine fails, in a step that resumes somebody."""

from __future__ import annotations

from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, greedy
from .invariants import steps_succeed

original = Scheduler._add_row


def _add_row(
    self: Scheduler, request: Request, plan: StepPlan, budget: int, num_cached: int = 0
) -> int:
    """Add a row of as many tokens as were counted before the request got its blocks."""
    num_new_tokens = original(self, request, plan, budget, num_cached)
    row = plan.rows[-1]
    row.num_new_tokens = min(budget, num_new_tokens + num_cached)
    return row.num_new_tokens


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.scheduler.Scheduler._add_row",
    broken=_add_row,
    traffic=[
        Arrival(0, "a", list(range(30, 38)), greedy(8)),
        Arrival(0, "b", list(range(50, 58)), greedy(8)),
    ],
    invariant=steps_succeed,
    config={"max_model_len": 16, "kv_cache_tokens": 24},
    text="""
question: b is preempted, and its blocks stay findable. Count for the step in which it is resumed:
  how many tokens does b have, how many of them are found, and how long is its row?
cause: The tokens to compute are counted before the request is given its blocks. The hit, which
  comes with them, moves the beginning of the row, and not its length: it ends after the last
  known token. A new request that finds nothing does not show it.
invariant: A row ends at the last known token, or before.
fix: Count what is to be computed after the hit is known.
test: tests/m4/test_hits.py::test_of_a_wholly_cached_prompt_exactly_one_token_is_computed
seen: A list index out of range in the runner, with hundreds of requests only: preempted ones found
  their own blocks. Several people mended it, on both sides of the plan.
threads: GeeeekExplorer/nano-vllm#207 (merged), GeeeekExplorer/nano-vllm#211 (open),
  GeeeekExplorer/nano-vllm#233 (open)
""",
    walk="""
call exercises/museum/planned_too_long.py::_add_row, when num_cached
A request that was found in the cache gets its row.
p (request.num_computed_tokens, request.num_tokens)  # found, and known
Try `p request.num_uncomputed_tokens`: what is left. Then `r`: it returns the length of the row.
""",
)
