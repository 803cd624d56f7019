"""The engines of museum_three_traces.py. Which bugs they have is in here: read it afterwards."""

from __future__ import annotations

import functools
from dataclasses import replace

from exercises.museum.exhibit import Arrival, Exhibit, greedy
from exercises.museum.invariants import names_are_true
from exercises.museum.lines import lines
from exercises.museum.rooms import exhibit

LONG = list(range(120, 133))
LETTER = [31, 77, 12, 90, 44, 8, 63, 150]


@functools.cache
def engines() -> dict[str, Exhibit]:
    """An exhibit for each letter, with traffic that is not the museum's."""
    return {
        "A": replace(
            exhibit("second_turn"),
            invariant=names_are_true,
            traffic=[
                Arrival(0, "ann", [11, 12, 13, 14, 15, 16], greedy(4)),
                Arrival(1, "bob", [21, 22, 23, 24, 25, 26], greedy(6)),
                Arrival(8, "ann2", [61, 62], greedy(3), after="ann"),
                Arrival(8, "bob2", [61, 62], greedy(3), after="bob"),
            ],
        ),
        "B": replace(
            exhibit("tokens_too_many"),
            traffic=[
                Arrival(0, "ann", [11, 12, 13, 14, 15], greedy(5)),
                Arrival(2, "bob", LONG, greedy(4)),
                Arrival(4, "cat", [21, 22], greedy(3)),
            ],
        ),
        "C": replace(
            exhibit("anothers_words"),
            invariant=names_are_true,
            config={"max_model_len": 32, "kv_cache_tokens": 32},
            traffic=[
                Arrival(0, "ann", LETTER, greedy(2)),
                Arrival(3, "bob", LETTER[::-1], greedy(2)),
                Arrival(6, "cat", list(range(100, 116)), greedy(2)),
                Arrival(9, "dan", [*LETTER[::-1], 5], greedy(2)),
                Arrival(12, "eve", [*LETTER, 5], greedy(2)),
            ],
        ),
    }


def main() -> None:
    """Print the three traces."""
    for letter, own in engines().items():
        run = own.suspect()
        asked = {name: len(prompt) for name, prompt in run.prompts.items()}
        wanted = "; ".join(f"{name}: {num} tokens" for name, num in asked.items())
        print(f"\n--- {letter} ---  prompts: {wanted}; at most "
              f"{own.config.get('max_num_batched_tokens', 64)} tokens a step\n")  # fmt: skip
        for step, text in enumerate(lines(run)):
            print(f"step {step}", *text, sep="\n    ")
