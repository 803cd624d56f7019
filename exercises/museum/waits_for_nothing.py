"""Running 1, waiting 1, most of the memory free: so it stays until the long request is done."""

from __future__ import annotations

from m3_paged.scheduler import Scheduler
from milestone_llm.core.request import Request

from .exhibit import Arrival, Exhibit, greedy
from .invariants import reasons_hold


class Patient(Scheduler):
    """One method is not M3's."""

    def reason_to_wait(self, request: Request, budget: int) -> str | None:
        """Why a request cannot join. While the same requests run, it is asked once."""
        asked = vars(self).setdefault("asked", {})
        key = (request.request_id, *(each.request_id for each in self.running))
        if key not in asked:
            asked[key] = super().reason_to_wait(request, budget)
        reason: str | None = asked[key]
        return reason


EXHIBIT = Exhibit(
    milestone="m3_paged",
    place="m3_paged.engine.Scheduler",
    broken=Patient,
    traffic=[
        Arrival(0, "a", list(range(30, 46)), greedy(8)),
        Arrival(0, "b", list(range(50, 62)), greedy(3)),
    ],
    invariant=reasons_hold,
    config={"max_model_len": 24, "max_num_batched_tokens": 24},
    text="""
question: The budget of a step is 24 tokens. Add up what each step computes, and read why b
  waits.
cause: The answer to "may b join?" is kept as long as the same requests run. In step 0 it was no:
  a's prompt took the budget. In step 1 a needs one token, but nobody asks again.
invariant: A reason to wait is worked out in the step that states it. What it says of budget,
  rows and blocks is true of that step.
fix: Do not keep it. The question is cheap: three comparisons.
test:
  tests/m3/test_scheduler_rules.py::test_a_recomputation_waits_for_a_step_that_has_room_for_it
seen: A flag "the batch is full" was set in one step and outlived its reason: first as a hang,
  later as latency.
threads: sgl-project/sglang#23138 (merged), sgl-project/sglang#22518 (open),
  sgl-project/sglang#35537 (open)
""",
    walk="""
return exercises/museum/waits_for_nothing.py::Patient.reason_to_wait, when len(self.running) == 1
  and budget > 20
A step in which a has one token.
p budget  # left for b
p __return__  # what b is told
Try `p super(Patient, self).reason_to_wait(request, budget)`: what the question gives if it is
  asked.
""",
)
