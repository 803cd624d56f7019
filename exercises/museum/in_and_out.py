"""The GPU works twice as much as it did last week, for the same answers."""

from __future__ import annotations

from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import RequestStatus

from .exhibit import Arrival, Exhibit, greedy
from .invariants import progress_is_made


def _prefill(self: Scheduler, plan: StepPlan, budget: int) -> None:
    """Plan the next chunk of each prompt, then new prompts. No block is taken before its chunk."""
    for request in self.by_seniority():
        if budget and request.num_uncomputed_tokens > 1 and self._make_room(request, plan):
            budget -= self._add_row(request, plan, budget)
    num_free_rows = self.config.max_num_seqs - len(self.running)
    while self.waiting and budget and num_free_rows and not plan.preempted:
        request = self.waiting.peek()
        num_tokens = min(request.num_tokens, budget)
        if not self.kv.blocks.can_allocate(num_tokens):
            plan.waiting_reasons[request.request_id] = self.kv.blocks.describe(num_tokens)
            break
        self.waiting.pop()
        self.kv.blocks.allocate(request.request_id, num_tokens)
        request.become(RequestStatus.RUNNING)
        self.running.append(request)
        (plan.resumed if request.num_preemptions else plan.admitted).append(request)
        budget -= self._add_row(request, plan, budget)
        num_free_rows -= 1


EXHIBIT = Exhibit(
    milestone="m4_prefix_chunked",
    place="m4_prefix_chunked.scheduler.Scheduler._prefill",
    broken=_prefill,
    traffic=[
        Arrival(0, "a", list(range(30, 41)), greedy(10)),
        Arrival(2, "b", list(range(50, 80)), greedy(2)),
    ],
    invariant=progress_is_made,
    config={
        "max_model_len": 40,
        "max_num_batched_tokens": 12,
        "kv_cache_tokens": 40,
        "enable_prefix_caching": False,
    },
    text="""
question: Follow b from step 2 to step 9: what it computes, in how many blocks, and what is left
  of it. For how many tokens did it get blocks, and when was that decided?
cause: Admission asks for the blocks of one chunk. The next step asks for those of the whole
  prompt; they are not there, and b is the last who came: it is preempted for its own sake, and
  what it computed is lost. Two steps later the same again.
invariant: Between two preemptions a request gains a token. A stricter one is broken in step 2:
  who is admitted has room for all its known tokens.
fix: Chunk the computing, not the admission: ask for the blocks of all known tokens.
test: tests/m4/test_chunks.py::test_a_whole_prompt_reserves_its_blocks_at_admission
seen: A preempted request was resumed with blocks for its first chunk, and preempted again in the
  next step for want of the others.
threads: vllm-project/vllm#25538 (open)
""",
    walk="""
call m4_prefix_chunked/scheduler.py::Scheduler._make_room, when request.request_id == 'b' and
  request.num_computed_tokens
b has computed its first chunk, and needs blocks for the second.
p len(self.kv.blocks_of(request))  # what it has
p self.kv.describe(request)  # what it needs, and what there is
Try `n` until somebody is preempted. Who?
""",
)
