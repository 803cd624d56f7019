"""M3: find a bug in an engine from its trace.

Somebody has changed M3. Its invariants still hold after every step (`check_invariants=True`): no
block is lost, and none is free and owned at once. Every request gets as many tokens as it wants.
But a user complains that one completion has other tokens than yesterday. Run

    python exercises/m3_find_the_bug.py

It serves four requests, some with two completions (n=2) that share the blocks of their prompt. It
prints which completions are not what a correct engine gives, and leaves a trace and a page:

    runs/find_the_bug.jsonl     one line a step; with `LLM_TRACE=1` before `python`, also printed
    runs/find_the_bug.html      open it in a browser: who owns which block at every step

Do not read the changed code (m3_find_the_bug_engine.py). In production you would not know where to
look, either. Find out from the trace what went wrong first. It is earlier than the first wrong
token. What should have happened is in M3's walkthrough, from "one prompt, two completions" on
(`python -m m3_paged.walkthrough`, or docs/transcripts/m3_walkthrough.txt).

Every row of a step computes the tokens from `start` on. The token at position p is written to the
block `blocks[p // 4]` of its row, at offset `p % 4`. Ask at every step: who writes where, and who
else reads there?

    python -m pytest tests/exercises/test_m3_find_the_bug.py
"""

from __future__ import annotations

from dataclasses import dataclass

CAUSES = {
    "a": "a request writes into a block that it shares with another, and no copy is made before",
    "b": "a block is given to a request while another one still has it",
    "c": "a block table is shorter than its request, which writes beyond its end",
    "d": "tokens whose KV was dropped by a preemption are not computed again",
    "e": "a request is computed at wrong positions",
}


@dataclass(frozen=True)
class Finding:
    """What went wrong first."""

    step: int
    """The step in which KV memory was damaged."""
    requests: set[str]
    """Ids of the two requests that met there, as the trace calls them, such as {"r7", "r7/1"}."""
    block: int
    """The block that was damaged."""
    position: int
    """Position of the token in its request whose keys and values were written over."""
    cause: str
    """A letter of `CAUSES`."""


def finding() -> Finding:
    """What you found.

    Hint: the page draws a ring around shared blocks. Two requests may share a block as long as
    neither writes into it. Write down the tables of the two completions of each prompt, step by
    step, and the position at which each writes. The completions of one prompt behave otherwise than
    those of the other.
    """
    raise NotImplementedError


if __name__ == "__main__":
    from m3_find_the_bug_engine import main

    main()
