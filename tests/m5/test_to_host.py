"""Tokens on their way to the host."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from m5_kernels.to_host import HostTokens


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
