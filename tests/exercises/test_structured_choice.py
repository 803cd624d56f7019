"""Checks exercises/structured_choice.py."""

import random

EXERCISE = ("structured_choice.py", "allowed_tokens")

CHOICES = ["red", "reddish", "blue"]
TEXTS = ["<end>", "r", "e", "d", "re", "ed", "red", "dish", "b", "blue", "lue", "x", "bluest",
         "i", "s", "h"]  # fmt: skip
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


def test_cases(exercise):
    for output, wanted in CASES:
        got = exercise(CHOICES, TEXTS, 0, [TEXTS.index(text) for text in output])
        found = sorted(TEXTS[token_id] for token_id in got)
        assert found == sorted(wanted), (
            f"choices {CHOICES}, output {output}: {sorted(wanted)} may come next, yours: {found}"
        )


def test_whoever_takes_allowed_tokens_ends_with_a_choice(exercise, figure):
    first = len(exercise(CHOICES, TEXTS, 0, []))
    figure("tokens that may come first", str(first), str(len(TEXTS)))
    rng, reached = random.Random(0), set()
    for _ in range(300):
        output = []
        while not output or output[-1] != 0:
            allowed = sorted(exercise(CHOICES, TEXTS, 0, output))
            text = "".join(TEXTS[token_id] for token_id in output)
            assert allowed, f"nothing may follow {text!r}, which has allowed tokens alone"
            output.append(rng.choice(allowed))
        text = "".join(TEXTS[token_id] for token_id in output[:-1])
        assert text in CHOICES, f"{text!r} has ended, and is none of {CHOICES}"
        reached.add(text)
    assert reached == set(CHOICES), f"nobody says {set(CHOICES) - reached}"


def ends_as_soon_as_it_can(choices, texts, eos, output):
    text = "".join(texts[token_id] for token_id in output)
    allowed = (token_id for token_id, each in enumerate(texts) if token_id != eos)
    begun = {t for t in allowed if any(choice.startswith(text + texts[t]) for choice in choices)}
    return {eos} if text in choices else begun


WRONG, TOLD = ends_as_soon_as_it_can, "'dish'"
