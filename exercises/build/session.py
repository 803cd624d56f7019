"""Sessions: calls of one part as at Python's prompt, what each call must give, and why.

>>> pool = BlockPool(3)
>>> [pool.allocate(), pool.allocate()]  # the first of free_blocks has been free the longest;
... # a reason may go on
[0, 1]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .check import Wrong, explained

SHOWN = 6
"""Number of lines shown before the wrong one, in a message."""


@dataclass
class Call:
    """A line to type."""

    code: str
    why: str
    wanted: str = ""
    """The value that the line must give, as Python writes it; empty if it is not checked."""


def read_session(text: str) -> list[Call]:
    """Return the calls of a session, line by line."""
    calls: list[Call] = []
    for line in map(str.strip, text.strip().splitlines()):
        if line.startswith(">>> "):
            code, _, why = line[4:].partition("  # ")
            calls.append(Call(code, why))
        elif line.startswith("... # "):
            calls[-1].why += f" {line[6:]}"
        else:
            calls[-1].wanted += line
    return calls


def session(text: str, **names: Any) -> None:
    """Type in the lines of a session, and check the answers.

    Args:
        names: names that the lines may use.

    Raises:
        Wrong: an answer is not as expected, or the reader's code raises an exception.
        NotImplementedError: a function is not written yet.
    """
    typed: list[str] = []
    for call in read_session(text):
        typed.append(f"  >>> {call.code}")
        story = "\n".join(["  ..."] * (len(typed) > SHOWN) + typed[-SHOWN:])
        try:
            if not call.wanted:
                exec(call.code, names)
                continue
            got = eval(call.code, names)
        except (NotImplementedError, Wrong):
            raise
        except Exception as error:
            raise Wrong(f"{story}\n\n{explained(error)}") from error
        if got != (wanted := eval(call.wanted, names)):
            raise Wrong(f"{story}\n  yours     {got!r}\n  expected  {wanted!r}\nWhy: {call.why}")


def complains(function: Any, *arguments: Any) -> bool:
    """Whether a call raises AssertionError, as for a thing that only a bug does."""
    try:
        function(*arguments)
    except AssertionError:
        return True
    return False
