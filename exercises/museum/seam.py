"""Under load, some answers say a word twice."""

from __future__ import annotations

from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.outputs import EngineCoreOutput, SampledToken
from milestone_llm.core.request import Request, RequestStatus

from .exhibit import Arrival, Exhibit, greedy
from .invariants import positions_are_sampled_once

original = Scheduler._append


def _append(self: Scheduler, request: Request, sampled: list[SampledToken]) -> EngineCoreOutput:
    """Append a request's token. A preempted one computes everything again: nothing to keep."""
    if request.status is RequestStatus.WAITING:
        request.num_in_flight = 0
        return EngineCoreOutput(request.request_id, [sampled[0].token_id], [], None)
    return original(self, request, sampled)


EXHIBIT = Exhibit(
    milestone="m5_kernels",
    place="m4_prefix_chunked.scheduler.Scheduler._append",
    broken=_append,
    traffic=[
        Arrival(0, "a", list(range(30, 37)), greedy(8)),
        Arrival(0, "b", list(range(50, 55)), greedy(8)),
    ],
    invariant=positions_are_sampled_once,
    config={
        "max_model_len": 16,
        "kv_cache_tokens": 24,
        "enable_prefix_caching": False,
        "async_scheduling": True,
    },
    text="""
question: b is preempted in step 6 and resumed in step 8. What did it sample last before, and
  what first after? Mind the positions.
cause: The plan of step 6 preempts b while step 5 still samples b's token. When that token comes,
  b's caller gets it, but b's own list does not: "it computes all anew". So it samples the same
  position again, and its caller gets that, too.
invariant: The token of each position is sampled once and delivered once. A token under way
  belongs to its request, preempted or not.
fix: Append it. Preemption drops keys and values, never tokens.
test:
  tests/test_storm.py::test_random_traffic_loses_nothing_and_gives_everybody_the_right_tokens
seen: With steps planned ahead, a request can be preempted while its token is under way. Engines
  have lost such tokens, sent them twice, or dropped them and preempted three times as often.
threads: vllm-project/vllm#26385 (merged), vllm-project/vllm#38624 (closed),
  vllm-project/vllm-gaudi#1794 (merged)
""",
    walk="""
call exercises/museum/seam.py::_append, when request.status is RequestStatus.WAITING
A token comes for a request that was preempted after its step was launched.
p sampled[0].token_id  # what the caller will get
p len(request.token_ids)  # what b knows
Try `r` and `p len(request.token_ids)` again: the same.
""",
)
