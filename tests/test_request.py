"""A request by itself: when it ends, and what is left of it where something was interrupted."""

from __future__ import annotations

import torch

from milestone_llm.core.logprobs import logprob_columns
from milestone_llm.core.outputs import Logprob, SampledToken
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.prompt_logprobs import note_prompt_logprobs
from milestone_llm.core.request import Request, RequestStatus
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
