"""The museum: find three bugs, each from a trace alone.

Three engines of the museum (`python -m exercises.museum`) have served traffic that you have not
seen. There is no healthy run beside them, as there is none in production. Run

    python exercises/museum_three_traces.py

It prints the traces of A, B and C, a few lines a step:

    b 4..8 → 31, 4 cached [0 2]   row of b: positions computed, token sampled, tokens that the
                                  prefix cache saved, block table
    b 0..3 of 8 [0 2]             a row that ends before the last of 8 known tokens
    share 0 (b)                   b's table has block 0, too

A block has four slots: position p is in entry p // 4 of the table, at offset p % 4. Some answers
are wrong. Find in each trace the first line that names a request and that no correct engine prints:
its step, the request, and the cause. (The last line of a step names nobody; too many cached blocks
in it are a hint, and not yet the answer.)

    python -m pytest tests/exercises/test_museum_three_traces.py
"""

from __future__ import annotations

from dataclasses import dataclass

CAUSES = {
    "a": "a block is found by its old name, and another request has written into it",
    "b": "a block is found of which the last slot was never written",
    "c": "a block is copied before it is written",
    "d": "a row of no tokens is sampled",
    "e": "a row that does not reach the last known token is sampled",
    "f": "two requests write into one slot",
    "g": "a token is sampled again after a preemption",
}


@dataclass(frozen=True)
class Finding:
    """What went wrong first in a trace."""

    step: int
    request: str
    cause: str
    """A letter of `CAUSES`."""


def findings() -> dict[str, Finding]:
    """What you found in the traces "A", "B" and "C".

    Hint: ask three questions of every step. Which of a row's tokens were known before, and does the
    row end with the last of them? Who wrote last into each block that is shared? And was every slot
    of it written: up to which position had its owner computed?
    """
    raise NotImplementedError


if __name__ == "__main__":
    from museum_three_traces_engine import main

    main()
