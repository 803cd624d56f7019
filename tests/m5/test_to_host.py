"""Tokens on their way to the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from engine_helpers import make_request
from m1_single import SamplingParams
from m5_kernels.device_state import DeviceState
from m5_kernels.sampler import Needs, Sampler
from m5_kernels.to_host import HostTokens, fetch
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.request import Request


def test_tokens_of_a_step_stay_as_they_are_while_others_are_in_flight() -> None:
    host_tokens = HostTokens(5, torch.device("cpu"))
    of_graph = torch.empty(5, dtype=torch.int32)  # each replay writes there
    taken = []
    for step in range(2):  # as many as there ever are
        of_graph.fill_(step)
        taken.append(host_tokens.take(of_graph[:3]))
    assert [tokens.tolist() for tokens in taken] == [[0] * 3, [1] * 3]


def test_memory_that_a_kernel_may_still_write_to_is_kept_until_it_has():
    waits = []
    host_tokens = HostTokens(2, torch.device("cpu"))
    host_tokens.last = SimpleNamespace(synchronize=lambda: waits.append("waited"))
    assert not waits
    del host_tokens
    assert waits == ["waited"]


def test_tokens_come_in_the_order_of_the_steps_sequences() -> None:
    """Beside them in a graph are more; log-probabilities are for those who asked."""
    requests = [make_request("a"), None, Request("b", [0], SamplingParams(logprobs=1))]
    raw = torch.tensor([[1.0, 0, 0], [0, 0, 0], [0, 3.0, 0], [0, 0, 0]])
    sampler = Sampler(DeviceState(4, 8, 4, 3, torch.device("cpu")))
    rows = torch.arange(4, dtype=torch.int32)
    tokens = sampler.sample(raw, rows, torch.zeros(4, dtype=torch.int32), Needs(logprobs=True))
    read = fetch(requests, tokens, sampler, HostTokens(4, torch.device("cpu")))
    tokens.fill_(77)  # the step after it
    first, _, last = read()
    assert (first, last.token_id) == (SampledToken(0), 1)
    assert last.logprobs is not None
    assert last.logprobs[1].logprob == pytest.approx(float(raw[2].log_softmax(-1)[1]))
