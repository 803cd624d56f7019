"""What M5's sampler makes of rows of state is what the host's makes of the requests."""

from __future__ import annotations

import random

import pytest
import torch

from m5_kernels.device_state import DeviceState
from m5_kernels.sampler import Sampler, SamplingFeatures, needs_host_sampler
from m5_kernels.token_bitmask import TokenBitmask
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.core.request import Request
from milestone_llm.core.sampling import sample
from milestone_llm.core.sampling_params import SamplingParams

VOCAB_SIZE = 7
"""So few that outputs are full of repeats."""
NUM_ROWS = 64


def request_of(rng: random.Random) -> Request:
    """One with anything that changes scores, or several of them, in the middle of its output."""
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 24))]
    num_prompt_tokens = rng.randint(1, len(tokens))
    params = SamplingParams(
        temperature=0,
        repetition_penalty=rng.choice([1, 1, 1.2]),
        frequency_penalty=rng.choice([0, 0, 0.3, -0.2]),
        presence_penalty=rng.choice([0, 0, 1.1, -0.6]),
        logit_bias=rng.choice([{}, {3: 1.5}, {token: rng.random() for token in range(5)}]),
        min_tokens=rng.choice([0, 9, len(tokens) - num_prompt_tokens]),
        stop_token_ids=[VOCAB_SIZE + 1],  # which stops nobody
        max_tokens=40,
    )
    request = Request("r", tokens[:num_prompt_tokens], params, eos_token_ids=frozenset({2, 4}))
    request.token_ids = tokens
    return request


def test_scores_are_changed_as_on_the_host():
    rng = random.Random(3)
    requests = [request_of(rng) for _ in range(NUM_ROWS)]
    logits = torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    state = DeviceState(NUM_ROWS, 64, 16, VOCAB_SIZE, torch.device("cpu"))
    state.rows.token_ids.fill_(3)  # of those that were there before
    for row, request in enumerate(requests):
        state.add_request(row, request, 0)
    state.flush()
    rows = torch.arange(NUM_ROWS, dtype=torch.int32)
    positions = torch.tensor([each.num_output_tokens for each in requests], dtype=torch.int32)
    wanted = [token.token_id for token in sample(logits, requests)]
    sampler = Sampler(state)
    assert sampler.sample(logits, rows, positions, SamplingFeatures.of(requests)).tolist() == wanted
    for row, request in enumerate(requests):
        own = slice(row, row + 1)
        token = sampler.sample(
            logits[own], rows[own], positions[own], SamplingFeatures.of([request])
        )
        assert token.tolist() == wanted[own]


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": dict.fromkeys(range(17), 1.0)},
        {"stop_token_ids": list(range(17)), "min_tokens": 1},
    ],
)
def test_a_part_of_a_prompt_needs_no_sampler_of_the_host(params):
    """Several ranks would gather logits of no row."""
    request = Request("r", [1, 2, 3], SamplingParams(**params))
    assert not needs_host_sampler(ScheduledRequest(request, 0, 2))
    assert needs_host_sampler(ScheduledRequest(request, 0, 3))


def test_a_mask_goes_to_the_row_of_its_request():
    masks, scores, rows = (
        TokenBitmask(4, 40, torch.device("cpu")),
        torch.zeros(4, 40),
        torch.arange(4),
    )
    only_token_3 = torch.tensor([1 << 3, 0], dtype=torch.int32)
    for ruled in ({2, 3}, {1}, set()):  # those of the step before allow everything again
        masks.send(dict.fromkeys(ruled, only_token_3))
        num_allowed = masks.apply(scores, rows).isfinite().sum(dim=1).tolist()
        assert num_allowed == [1 if row in ruled else 40 for row in range(4)]


def test_a_row_without_biases_has_none():
    state = DeviceState(1, 8, 4, VOCAB_SIZE, torch.device("cpu"))
    for biases, total in (({3: 1.5}, 24), ({}, 0)):  # the second takes the row of the first
        state.add_request(0, Request("r", [1], SamplingParams(logit_bias=biases)), 0)
        state.flush()
        assert float(state.views["biases"].sum()) == total


def test_min_tokens_bans_no_token_where_none_stops():
    request = Request("r", [1], SamplingParams(temperature=0, min_tokens=2))
    state = DeviceState(1, 8, 4, VOCAB_SIZE, torch.device("cpu"))
    state.add_request(0, request, 0)
    state.flush()
    row, place = torch.zeros(2, 1, dtype=torch.int32)
    logits = -torch.arange(VOCAB_SIZE)[None].float()  # token 0 is the likeliest
    features = SamplingFeatures.of([request])
    assert Sampler(state).sample(logits, row, place, features).tolist() == [0]
