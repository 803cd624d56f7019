"""Running 2, waiting 1, most of the memory free: so it stays until somebody ends."""

from __future__ import annotations

from m3_paged.scheduler import Scheduler
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, greedy
from .invariants import reasons_hold

original = Scheduler.reason_to_wait


def reason_to_wait(self: Scheduler, request: Request, budget: int) -> str | None:
    """Return why a request cannot join. The answer is kept while the same requests run."""
    asked = vars(self).setdefault("asked", {})
    key = (request.request_id, *(each.request_id for each in self.running))
    if key not in asked:
        asked[key] = original(self, request, budget)
    reason: str | None = asked[key]
    return reason


EXHIBIT = Exhibit(
    milestone="m3_paged",
    place="m3_paged.scheduler.Scheduler.reason_to_wait",
    broken=reason_to_wait,
    traffic=[
        Arrival(0, "z", [20, 21, 22], greedy(5)),
        Arrival(1, "a", list(range(30, 46)), greedy(8)),
        Arrival(1, "b", list(range(50, 62)), greedy(3)),
    ],
    invariant=reasons_hold,
    config={"max_model_len": 24, "max_num_batched_tokens": 24},
    text="""
question: The budget of a step is 24 tokens. Work out for steps 1 to 5 what is left of it when b
  is looked at. In which of them is the number in b's line true? And what is different in step 5,
  in which b is let in beside a?
cause: The answer to "may b join?" is kept as long as the same requests run. In step 1 it was no:
  a's prompt took the budget. In steps 2 to 4 a and z need one token each, but nobody asks again.
  In step 5 z is gone, and b is asked anew.
invariant: A reason to wait is worked out in the step that states it. What it says of budget,
  rows and blocks is true of that step.
fix: Do not keep it. The question is cheap: three comparisons.
test:
  tests/milestones/test_golden_plans.py::test_blocks
seen: A flag "the batch is full" was set in one step and outlived its reason: first as a hang,
  later as latency.
threads: sgl-project/sglang#23138 (merged), sgl-project/sglang#22518 (open),
  sgl-project/sglang#35537 (open)
""",
    walk="""
return exercises/museum/waits_for_nothing.py::reason_to_wait, when len(self.running) == 2
  and budget > 20
A step in which z and a have one token each.
p budget  # left for b
p __return__  # what b is told
Try `p original(self, request, budget)`: what the question gives if it is asked.
""",
)
