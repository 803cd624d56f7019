"""The guide of a walkthrough, as text: a title, an introduction, and the stops in order.

    M2: requests are chosen at every step

    Three requests come to an engine with two rows.

    # r2 is told why it waits
    return m2_batching/scheduler.py::Scheduler.reason_to_wait, when request.request_id == 'r2'
    r0 and r1 are in, and there is no third row.
    p budget == 1  # tokens left: 9 - 3 - 5
    p self.waiting  # a value that is shown, whatever it is
    Try `ll` (the tests), `u` (who asked).

A stop is a function, never a line number: `call` is before its first line, `return` when it returns
`__return__`. The condition and the values are expressions with the frame's names. `hits` is how
often the function was called (or has returned) since the walkthrough began, this time included. A
line that begins with spaces continues the line before.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Look:
    """An expression to look at, its meaning, and an expression of its expected value."""

    expression: str
    expected: str
    meaning: str

    def evaluate(self, names: Mapping[str, Any]) -> tuple[str, bool]:
        """Return the value's `repr` without memory addresses, and whether it is the expected
        one."""
        try:
            value = eval(self.expression, dict(names))
            expected = eval(self.expected, dict(names)) if self.expected else value
            is_right = repr(value) == repr(expected) or bool(value == expected)
        except Exception as error:
            return f"raised {type(error).__name__}: {error}", False
        return re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x...", repr(value)), is_right

    def is_guessed(self, guess: str, names: Mapping[str, Any]) -> bool:
        """Return whether a text has the value's words and numbers, in order.

        Brackets, quotes and commas may be left out: `0 1` is `[0, 1]`. The parts of a dict or a set
        may come in any order.
        """
        words, (shown, is_right) = _words(guess), self.evaluate(names)
        value = eval(self.expression, dict(names)) if is_right else None  # else it may raise
        if not isinstance(value, dict | set):
            return words == _words(shown)
        parts = value.items() if isinstance(value, dict) else value
        return _are_told(words, [_words(repr(part)) for part in parts])


def _words(text: str) -> list[str]:
    return re.findall(r"[\w.+-]+", text.lower())


def _are_told(words: list[str], parts: list[list[str]]) -> bool:
    """Return whether `words` are the words of all parts, one part after the other."""
    if not parts:
        return not words
    return any(
        words[: len(part)] == part
        and _are_told(words[len(part) :], parts[:index] + parts[index + 1 :])
        for index, part in enumerate(parts)
    )


@dataclass(frozen=True)
class Stop:
    """A function where the walkthrough stops, and the text of its card."""

    title: str
    event: str
    """`call` or `return`."""
    location: str
    """`m1_single/scheduler.py::Scheduler.schedule`; imported when the walkthrough runs."""
    when: str
    """The condition; empty: stop at the next time."""
    note: str
    """One to four sentences: what happens here, and why."""
    looks: Sequence[Look]
    hint: str
    """pdb commands that are useful here."""

    @functools.cached_property
    def function(self) -> Callable[..., Any]:
        """The Python function at `location`, without its property, class method or decorator.

        Raises:
            ValueError: there is none, as for a class or a function written in C.
        """
        thing = pkgutil.resolve_name(self.location.replace("/", ".").replace(".py::", ":"))
        for wrapper in ("fget", "func", "__func__"):  # property, cached_property, class method
            thing = getattr(thing, wrapper, thing)
        function = inspect.unwrap(thing)
        if not inspect.isfunction(function):
            raise ValueError(f"a stop needs a Python function, {self.location} is {thing!r}")
        return function


@dataclass(frozen=True)
class Guide:
    """A whole walkthrough, without its scenario."""

    title: str
    intro: str
    stops: Sequence[Stop]


def parse_guide(text: str) -> Guide:
    """Return the guide in a text of the form that this module's docstring shows.

    Raises:
        ValueError: a stop's second line or a line with a value has another form.
    """
    head, *stops = re.split(r"^# ", text.strip(), flags=re.M)
    title, _, intro = head.partition("\n")
    return Guide(title, intro.strip(), [_read_stop(stop) for stop in stops])


def _read_stop(text: str) -> Stop:
    title, location, *rows = re.sub(r"\n +", " ", text.strip()).split("\n")
    header = re.fullmatch(r"(call|return) ([\w/]+\.py::[\w.]+)(?:, when (.+))?", location)
    if header is None:
        raise ValueError(
            f"{title}: want `call|return FILE::FUNCTION[, when ...]`, got {location!r}"
        )
    looks = [read_look(row) for row in rows if row.startswith("p ")]
    hint = " ".join(row for row in rows if row.startswith("Try "))
    note = " ".join(row for row in rows if not row.startswith(("p ", "Try ")))
    return Stop(title, header[1], header[2], header[3] or "", note, looks, hint)


def read_look(row: str) -> Look:
    """Return the `Look` of a line with an expression, its expected value and its meaning."""
    # The last ` == ` is before the expected value.
    parts = re.fullmatch(r"p (.+?)(?: == (?!.* == )(.+?))? +# (.+)", row)
    if parts is None:
        raise ValueError(f"want `p EXPRESSION[ == VALUE]  # MEANING`, got {row!r}")
    return Look(parts[1], parts[2] or "", parts[3])
