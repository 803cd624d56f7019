"""After an urgent request has come and gone, a patient one answers something else."""

from __future__ import annotations

from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import RequestStatus

from .exhibit import Arrival, Exhibit, greedy
from .invariants import found_blocks_are_written


def schedule(self: Scheduler) -> StepPlan:
    """Plan running requests in the order in which they were admitted, then waiting ones."""
    plan, budget = StepPlan(), self.config.max_num_batched_tokens
    self.kv.begin_step()
    for request in list(self.running):
        if not budget or request.status is not RequestStatus.RUNNING:
            continue
        if request.num_uncomputed_tokens == 1 and not self._make_room(request, plan):
            continue
        for row in list(plan.rows):
            if row.request.status is not RequestStatus.RUNNING:  # it had to go, and its row too
                plan.rows.remove(row)
                budget += row.num_new_tokens
        budget -= self._add_row(request, plan, budget)
    self._prefill(plan, budget)
    return plan


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.scheduler.Scheduler.schedule",
    broken=schedule,
    traffic=[
        Arrival(0, "a", list(range(30, 63)), greedy(4), priority=2),
        Arrival(1, "b", [23, 42, 17, 8], greedy(2), priority=0),
    ],
    invariant=found_blocks_are_written,
    config={
        "policy": "priority",
        "max_model_len": 40,
        "max_num_batched_tokens": 16,
        "long_prefill_token_threshold": 8,
        "kv_cache_tokens": 40,
    },
    text="""
question: a is preempted in step 2 and resumed in step 3. How many of its tokens had been computed
  by then, and how many does it find in the cache?
cause: Running requests are served in the order of admission, and a is first: its row of step 2 is
  planned, so the two blocks that it will fill can be found. Then b, which is more urgent, needs a
  block, and a has to go. Its row is withdrawn, but not the names of its blocks. a comes back and
  finds 24 tokens, of which 8 were never computed.
invariant: A block that is found was written to its last slot, in this step at the latest.
fix: Forget the blocks of a row that is withdrawn. Or serve the most urgent first, as M4 does: then
  the request that has to go never has a row.
test: tests/m4/test_vllm_plans.py::test_no_row_reads_what_was_never_written
seen: In vLLM 0.33.0, 0.26.0 and others, with policy priority and the prefix cache. It was found
  here by reading back what was written, and was known there.
threads: vllm-project/vllm#43569 (open), vllm-project/vllm#57580 (open)
""",
    walk="""
return m4_prefix_chunked/prefix_cache.py::PrefixCache.find, when request.request_id == 'a' and
  __return__.blocks
a was preempted in the step before, after two chunks of eight tokens. It looks for them.
p __return__  # what it finds
p 2 * 8  # what it has computed
Then read `schedule` in exercises/museum/withdrawn_row.py: which line forgets something?
""",
)
