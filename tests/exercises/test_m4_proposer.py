"""Checks exercises/m4_proposer.py."""

from __future__ import annotations

import functools
import random

from m4_prefix_chunked.ngram import NgramProposer
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams

EXERCISE = ("m4_proposer.py", "SharedProposer")
WRONG, TOLD = NgramProposer, "were all told before"

NUM_GUESSES = 3


def answers():
    """Forty answers of a help desk, each of three of its eight sentences and words of its own."""
    rng = random.Random(0)
    sentences = [[rng.randrange(1000) for _ in range(12)] for _ in range(8)]
    texts = []
    for _ in range(40):
        text = [rng.randrange(1000) for _ in range(3)]
        for sentence in rng.sample(sentences, 3):
            text += [*sentence, rng.randrange(1000)]
        texts.append(text)
    return texts


def request_of(name, prompt, salt=""):
    return Request(name, list(prompt), SamplingParams(max_tokens=100, cache_salt=salt))


def serve(proposer, text, salt=""):
    """Let a request write this text, guesses included. Returns the steps that it takes."""
    request, num_steps = request_of("r", text[:2], salt), 0
    while len(request.token_ids) < len(text):
        rest = text[len(request.token_ids) :]
        guesses = proposer.propose(request, NUM_GUESSES)
        assert len(guesses) <= NUM_GUESSES, f"{len(guesses)} guesses, {NUM_GUESSES} were asked for"
        num_right = 0
        while num_right < min(len(guesses), len(rest)) and guesses[num_right] == rest[num_right]:
            num_right += 1
        request.token_ids += rest[: num_right + 1]
        num_steps += 1
    return num_steps


@functools.cache
def tokens_a_step(kind):
    proposer, texts = kind(), answers()
    return sum(len(text) - 2 for text in texts) / sum(serve(proposer, text) for text in texts)


def test_a_step_brings_more_tokens(exercise, figure):
    got, before = tokens_a_step(exercise), tokens_a_step(NgramProposer)
    figure("tokens that a step brings", f"{got:.2f}", f"{before:.2f}")
    assert got >= before + 0.5, (
        f"a step brings {got:.2f} tokens; with guesses from a request's own tokens it is "
        f"{before:.2f}. The sentences of the desk were all told before."
    )


def test_own_tokens_come_first(exercise):
    proposer = exercise()
    other = request_of("a", [1, 2, 3, 70, 71, 72, 73])
    proposer.propose(other, NUM_GUESSES)
    own = request_of("b", [9, 2, 3, 50, 51, 52, 53, 1, 2, 3])
    guesses = proposer.propose(own, NUM_GUESSES)
    assert guesses == [50, 51, 52], (
        f"the request's own tokens say that 50, 51, 52 follow 2, 3; guessed were {guesses}"
    )


def test_three_tokens_count_more_than_two(exercise):
    proposer = exercise()
    proposer.propose(request_of("a", [1, 2, 3, 70, 71, 72, 73]), NUM_GUESSES)
    proposer.propose(request_of("b", [9, 2, 3, 50, 51, 52, 53]), NUM_GUESSES)
    guesses = proposer.propose(request_of("c", [8, 1, 2, 3]), 2)
    assert guesses == [70, 71], f"1, 2, 3 were followed by 70, 71; guessed were {guesses}"
    guesses = proposer.propose(request_of("d", [8, 7, 2, 3]), 2)
    assert guesses == [50, 51], (
        f"nobody was told 7, 2, 3; the last time, 50, 51 followed 2, 3; guessed were {guesses}"
    )


def test_the_last_time_counts(exercise):
    proposer = exercise()
    proposer.propose(request_of("a", [1, 2, 3, 70, 71]), NUM_GUESSES)
    proposer.propose(request_of("b", [1, 2, 3, 80, 81]), NUM_GUESSES)
    guesses = proposer.propose(request_of("c", [8, 1, 2, 3]), 2)
    assert guesses == [80, 81], (
        f"1, 2, 3 were followed by 70, 71 and the last time by 80, 81; guessed were {guesses}"
    )


def test_tenants_stay_apart(exercise):
    proposer = exercise()
    proposer.propose(request_of("a", [1, 2, 3, 70, 71, 72, 73], salt="clinic"), NUM_GUESSES)
    guesses = proposer.propose(request_of("b", [8, 1, 2, 3], salt="bank"), NUM_GUESSES)
    assert guesses == [], f"the bank guesses {guesses}, which only the clinic was told"
    assert proposer.propose(request_of("c", [8, 1, 2, 3], salt="clinic"), 2) == [70, 71]


def test_nothing_is_guessed_behind_a_token_in_flight(exercise):
    proposer, request = exercise(), request_of("a", [1, 2, 3, 4, 1, 2, 3])
    request.num_in_flight = 1
    assert proposer.propose(request, NUM_GUESSES) == [], "its last token is not known yet"
