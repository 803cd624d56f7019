"""A request by itself: when it ends, what an interruption leaves of it; and the queue's cost."""

from __future__ import annotations

import torch

from helpers.schedulers import of_length
from milestone_llm.core.logprobs import logprob_columns
from milestone_llm.core.outputs import Logprob, SampledToken
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.prompt_logprobs import note_prompt_logprobs
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.core.request_queue import RequestQueue
from milestone_llm.core.sampling_params import SamplingParams

PROMPT = [5, 6, 7]


def test_a_stop_token_ends_it_behind_min_tokens_others():
    request = Request("r", PROMPT, SamplingParams(min_tokens=2, stop_token_ids=[9]))
    request.become(RequestStatus.RUNNING)
    reasons = []
    for _ in range(3):
        request.append_token(SampledToken(9))
        reasons.append(request.finish_reason)
    assert reasons == [None, None, "stop"]


def test_a_token_that_was_half_taken_leaves_no_log_probabilities():
    request = Request("r", PROMPT, SamplingParams(logprobs=0))
    request.become(RequestStatus.RUNNING)
    request.append_token(SampledToken(8, {8: Logprob(-1.0, 1)}))
    request.logprobs.append({9: Logprob(-2.0, 1)})  # and there, Ctrl-C
    request.restart()
    assert request.output_token_ids == [8]
    assert request.logprobs == [{8: Logprob(-1.0, 1)}]


def test_a_prompt_that_is_computed_again_has_its_log_probabilities_once():
    request = Request("r", PROMPT, SamplingParams(prompt_logprobs=0))
    row = ScheduledRequest(request, 0, 3)
    positions, columns = (
        row.prompt_positions,
        logprob_columns(torch.eye(9)[5:7], torch.tensor([6, 7]), 0),
    )
    for _ in range(2):
        note_prompt_logprobs(row, positions, columns)
    assert [entry and next(iter(entry)) for entry in request.prompt_logprobs] == [None, 6, 7]


def test_a_thousand_requests_are_served_by_looking_at_few_of_them(monkeypatch):
    """O(log n) each: a queue that sorted or searched at every step would look at a million."""
    looks, key = list[Request](), RequestQueue.key

    def counting_key(self, request):
        looks.append(request)
        return key(self, request)

    monkeypatch.setattr(RequestQueue, "key", counting_key)
    queue = RequestQueue("priority")
    requests = [of_length(f"q{n}", 4, arrival=n, priority=n % 7) for n in range(1000)]
    for request in requests:
        queue.add(request)
    for request in requests[::3]:
        queue.remove(request)
    served = []
    while queue:
        request = queue.pop()
        served.append((request.priority, request.arrival))
    assert served == sorted(served)
    assert len(served) == 1000 - len(requests[::3])
    assert len(looks) < 10 * len(requests)
