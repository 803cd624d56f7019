"""What n-grams of a request's own tokens guess, and how often they are read."""

from __future__ import annotations

import gc
import random

import pytest

from m4_prefix_chunked.ngram import NGRAM_LENGTHS, NgramProposer
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams


def request_of(token_ids: list[int]) -> Request:
    return Request("r", token_ids, SamplingParams(max_tokens=1000))


@pytest.mark.parametrize(
    ("known", "guesses"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6]),  # three tokens were seen before
        ([7, 2, 3, 4, 5, 6, 1, 2, 3], [4, 5, 6]),  # two were
        ([7, 7, 3, 4, 5, 6, 1, 2, 3], []),  # one does not count
        ([1, 2, 3, 8, 9, 2, 3, 4, 1, 2, 3], [8, 9, 2]),  # three before two, though longer ago
        ([1, 2, 3, 8, 1, 2, 3, 9, 0, 1, 2, 3], [9, 0, 1]),  # the last time counts
        ([5, 5, 5], [5, 5, 5]),  # guesses follow on guesses
        ([5], []),
    ],
)
def test_what_followed_the_last_tokens_before_is_guessed(known, guesses):
    request = request_of(known)
    assert NgramProposer().propose(request, 3) == guesses
    request.num_in_flight = 1
    assert NgramProposer().propose(request, 3) == [], "behind a token that nobody knows"


def test_token_by_token_the_guesses_are_those_of_a_search_through_all():
    rng, proposer, request = random.Random(0), NgramProposer(), request_of([1])
    num_guessed = 0
    for _ in range(500):
        request.token_ids.append(rng.randrange(5))
        guesses = proposer.propose(request, 4)
        assert guesses == search(request.token_ids, 4)
        num_guessed += bool(guesses)
    assert num_guessed > 400


def search(known: list[int], num_tokens: int) -> list[int]:
    for length in NGRAM_LENGTHS:
        for end in range(len(known) - 1, length - 1, -1):
            if known[end - length : end] == known[-length:]:
                return ((known[end:]) * num_tokens)[:num_tokens]
    return []


def test_every_token_is_read_once():
    class Counted(list):
        num_slices = 0

        def __getitem__(self, key):
            Counted.num_slices += isinstance(key, slice)
            return super().__getitem__(key)

    request, proposer = request_of([1]), NgramProposer()
    request.token_ids = Counted(range(1000))
    for token in range(200):
        request.token_ids.append(token)
        proposer.propose(request, 3)
    most = len(NGRAM_LENGTHS) * (len(request.token_ids) + 200)
    assert Counted.num_slices <= most, "more than each token once, and the end at each call"


def test_nothing_is_kept_of_requests_that_are_gone():
    proposer = NgramProposer()
    for number in range(5):
        proposer.propose(request_of([number] * 9), 3)
    gc.collect()
    assert len(proposer._indices) == 0
