"""Checks exercises/structured_choice.py."""

import random

import pytest

EXERCISE = ("structured_choice.py", "allowed_tokens")

CHOICES = ["red", "reddish", "blue"]
TEXTS = [
    "<end>",
    "r",
    "e",
    "d",
    "re",
    "ed",
    "red",
    "dish",
    "b",
    "blue",
    "lue",
    "x",
    "bluest",
    "i",
    "s",
    "h",
]
CASES = [
    ([], ["r", "re", "red", "b", "blue"]),
    (["r"], ["e", "ed"]),
    (["re"], ["d"]),
    (["r", "e"], ["d"]),
    (["red"], ["<end>", "d", "dish"]),
    (["b"], ["lue"]),
    (["blue"], ["<end>"]),
    (["x"], []),
]


def check_cases(allowed_tokens):
    for output, wanted in CASES:
        got = allowed_tokens(CHOICES, TEXTS, 0, [TEXTS.index(text) for text in output])
        found = sorted(TEXTS[token_id] for token_id in got)
        assert found == sorted(wanted), (
            f"choices {CHOICES}, output {output}: {sorted(wanted)} may come next, yours: {found}"
        )


def check_random_outputs(allowed_tokens):
    """Whoever takes any of the allowed tokens ends with a choice, and each choice is reached."""
    rng = random.Random(0)
    reached = set()
    for _ in range(300):
        output = []
        while not output or output[-1] != 0:
            allowed = sorted(allowed_tokens(CHOICES, TEXTS, 0, output))
            text = "".join(TEXTS[token_id] for token_id in output)
            assert allowed, f"nothing may follow {text!r}, which has allowed tokens alone"
            output.append(rng.choice(allowed))
        text = "".join(TEXTS[token_id] for token_id in output[:-1])
        assert text in CHOICES, f"{text!r} has ended, and is none of {CHOICES}"
        reached.add(text)
    assert reached == set(CHOICES)


def test_cases(exercise):
    check_cases(exercise)


def test_whoever_takes_allowed_tokens_ends_with_a_choice(exercise, figure):
    first = len(exercise(CHOICES, TEXTS, 0, []))
    figure("tokens that may come first", str(first), str(len(TEXTS)))
    check_random_outputs(exercise)


def test_an_end_as_soon_as_a_choice_is_complete_is_caught():
    def greedy_end(choices, texts, eos, output):
        text = "".join(texts[token_id] for token_id in output)
        if text in choices:
            return {eos}
        return {
            token_id
            for token_id, each in enumerate(texts)
            if token_id != eos and any(choice.startswith(text + each) for choice in choices)
        }

    with pytest.raises(AssertionError, match="'dish'"):
        check_cases(greedy_end)
