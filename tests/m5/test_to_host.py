"""Tokens on their way to the host."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from engine_helpers import make_request
from m5_kernels.extras.guesses.guesses import MISSING, REJECTED
from m5_kernels.to_host import NUM_TURNS, HostTokens, fetch
from milestone_llm.core.outputs import SampledToken


def test_tokens_of_a_step_stay_as_they_are_while_others_are_in_flight() -> None:
    host_tokens = HostTokens(5, torch.device("cpu"))
    of_graph = torch.empty(5, dtype=torch.int32)  # each replay writes there
    taken = []
    for step in range(NUM_TURNS):
        of_graph.fill_(step)
        taken.append(host_tokens.take(of_graph[:3]))
    assert [tokens.tolist() for tokens in taken] == [[step] * 3 for step in range(NUM_TURNS)]


def test_memory_that_a_kernel_may_still_write_to_is_kept_until_it_has():
    waits = []
    host_tokens = HostTokens(2, torch.device("cpu"))
    host_tokens.last = SimpleNamespace(synchronize=lambda: waits.append("waited"))
    assert not waits
    del host_tokens
    assert waits == ["waited"]


def test_guesses_that_came_true_stand_before_the_last_token_of_their_request():
    a, b, c = (make_request(name) for name in "abc")
    places = {0: (a, 5), 1: (a, 6), 2: (a, 7), 3: (a, MISSING), 4: (None, 9), 5: (b, 8)}
    places |= {6: (b, REJECTED), 7: (c, -1)}
    requests, tokens = zip(*places.values(), strict=True)
    host_tokens = HostTokens(len(places), torch.device("cpu"))
    read = fetch(requests, torch.tensor(tokens, dtype=torch.int32), [], None, host_tokens)
    sampled = read()
    assert [token.token_id for token in sampled["a"].accepted] == [5, 6]
    assert (sampled["a"].token_id, sampled["a"].num_missing) == (7, 1)
    assert (sampled["b"], sampled["c"]) == (SampledToken(8), SampledToken(-1))
