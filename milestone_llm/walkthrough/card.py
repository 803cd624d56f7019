"""What a walkthrough says at one stop: `Stop` and `Look`, and the card printed for them.

A card tells where the engine stands, what is happening, which expressions to look at and what to
expect of them. It holds no time, address or absolute path and is never wider than 80 columns, so
that the same engine prints the same card everywhere and a transcript can be checked for equality.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

WIDTH = 80
SHOWN: Any = object()
"""Stands for "no expectation": the value is only shown."""
MAX_VALUE_CHARACTERS = 800


@dataclass(frozen=True)
class Look:
    """An expression to look at, in the words of the frame's locals and globals.

    `expect` is the exact value (equal by `repr` or by `==`), so a tensor wants `.tolist()`.
    At a return, `__return__` is the value returned, as in pdb.
    """

    expression: str
    meaning: str
    expect: Any = SHOWN

    @property
    def has_expectation(self) -> bool:
        """Whether the value is compared, and not only shown."""
        return self.expect is not SHOWN

    def evaluate(self, namespace: Mapping[str, Any]) -> Seen:
        """The value now, with whether it is the expected one."""
        try:
            value = eval(self.expression, dict(namespace))
            shown = repr(value)
        except Exception as error:
            return Seen(self, f"raised {type(error).__name__}: {error}", is_right=False)
        is_right = not self.has_expectation or shown == repr(self.expect) or value == self.expect
        return Seen(self, _plain(shown), is_right=is_right is True)


@dataclass(frozen=True)
class Seen:
    """A `Look` with what was found there."""

    look: Look
    shown: str
    is_right: bool

    @property
    def expected(self) -> str:
        """The expected value, as a card or a message shows it."""
        return _plain(repr(self.look.expect))


@dataclass(frozen=True)
class Stop:
    """A place where the walkthrough stops: a function and a condition, never a line number.

    Raises:
        ValueError: `function` is nothing that Python code runs for, or `at` is neither value.
    """

    title: str
    function: Any
    """A function, method, property, or a decorated or inherited one."""
    note: str
    """One to four sentences: what happens here, and why."""
    look: Sequence[Look] = ()
    at: Literal["call", "return"] = "call"
    """Before the first line, or when a value is handed back (a generator: at each yield too)."""
    when: str = ""
    """Expression over the frame's names and `hits`: how often this function was called (or has
    returned) since the walkthrough began, this time included. Empty: the next time."""
    commands: Sequence[str] = ()
    """pdb commands worth typing here; a comment may follow after two spaces."""

    def __post_init__(self) -> None:
        if self.at not in ("call", "return"):
            raise ValueError(f'at must be "call" or "return", got {self.at!r} ({self.title})')
        plain_function(self.function)

    @property
    def code(self) -> CodeType:
        """The code object whose frames the stop waits for."""
        return plain_function(self.function).__code__

    @property
    def place(self) -> str:
        """Where the stop is, without absolute path: `m1_single/scheduler.py::Class.method`."""
        function = plain_function(self.function)
        path = Path(function.__code__.co_filename)
        depth = function.__module__.count(".") + (path.stem == "__init__") + 1
        return f"{'/'.join(path.parts[-depth:])}::{function.__qualname__}"


def plain_function(thing: Any) -> Callable[..., Any]:
    """The Python function behind a method, property, partial or decorated function.

    Raises:
        ValueError: there is none, as for a class or a function written in C.
    """
    while True:
        if isinstance(thing, property):
            thing = thing.fget
        elif isinstance(thing, functools.partial | functools.cached_property):
            thing = thing.func
        elif hasattr(thing, "__func__"):  # bound methods, classmethod, staticmethod
            thing = thing.__func__
        elif hasattr(thing, "__wrapped__") and not isinstance(thing, type):
            thing = inspect.unwrap(thing)
        else:
            break
    if not inspect.isfunction(thing):
        raise ValueError(f"a stop needs a function or method written in Python, got {thing!r}")
    return thing


class CardPrinter:
    """Prints cards: in colour on a terminal, as plain text of 80 columns anywhere else."""

    def __init__(self) -> None:
        is_terminal = sys.stdout.isatty()
        self._rule = "─" if is_terminal and sys.stdout.encoding.lower() == "utf-8" else "-"
        self._console = Console(
            file=sys.stdout,
            force_terminal=is_terminal,
            color_system="auto" if is_terminal else None,
            width=None if is_terminal else WIDTH,
            highlight=False,
        )
        self.width = min(WIDTH, self._console.width)

    def line(self, text: str = "", style: str = "", indent: int = 0, hang: int = 0) -> None:
        """Print text wrapped to the width; `hang` indents what follows its first line."""
        for number, paragraph in enumerate(text.split("\n")):
            start = " " * (indent + (hang if number else 0))
            rows = textwrap.wrap(
                paragraph,
                self.width,
                initial_indent=start,
                subsequent_indent=" " * (indent + hang),
                break_on_hyphens=False,
                drop_whitespace=True,
            )
            for row in rows or [""]:
                self._console.print(Text(row, style), soft_wrap=True)

    def rule(self, title: str) -> None:
        """Print a line across, with a title."""
        head = f"{self._rule * 2} {title} "
        self._console.print(
            Text(head + self._rule * (self.width - len(head)), "bold cyan"), soft_wrap=True
        )

    def card(self, stop: Stop, number: int, total: int, seen: Sequence[Seen]) -> None:
        """Print what the walkthrough has to say at a stop."""
        self.line()
        self.rule(f"Stop {number} of {total}: {stop.title}")
        self.line(f"{stop.place}, on {stop.at}", "bold")
        for row in _def_lines(stop):
            self.line(row, "green", indent=2, hang=8)
        if stop.when:
            self.line(f"stopped when {stop.when}", "dim", indent=4, hang=2)
        self.line()
        self.line(" ".join(stop.note.split()))
        for each in seen:
            self._look(each)
        if stop.commands:
            self.line()
            self.line("Worth typing:", "bold")
            rows = [command.partition("  ")[::2] for command in stop.commands]
            width = max(len(command) for command, _ in rows)
            for command, comment in rows:
                self.line(f"{command:{width}}   {comment}", "cyan", indent=2, hang=width + 3)

    def _look(self, seen: Seen) -> None:
        self.line()
        self.line(f"p {seen.look.expression}", "cyan", indent=2, hang=2)
        self.line(seen.look.meaning, indent=4)
        value, style = f"= {seen.shown}", ""
        if seen.look.has_expectation:
            value += "   as expected" if seen.is_right else f"   EXPECTED {seen.expected}"
            style = "green" if seen.is_right else "bold red"
        self.line(value, style, indent=4, hang=2)


def _plain(shown: str) -> str:
    """A repr without memory addresses, cut off where no reader would follow."""
    shown = re.sub(r"\bat 0x[0-9a-fA-F]+", "at 0x...", shown)
    if len(shown) > MAX_VALUE_CHARACTERS:
        shown = f"{shown[:MAX_VALUE_CHARACTERS]}... ({len(shown)} characters)"
    return shown


def _def_lines(stop: Stop) -> list[str]:
    """The function's signature as its source has it now."""
    try:
        source = inspect.getsource(plain_function(stop.function))
    except OSError:  # typed at a prompt, or the file is gone
        return []
    rows = textwrap.dedent(source).splitlines()
    starts = [i for i, row in enumerate(rows) if re.match(r"(async )?def ", row)]
    if not starts:
        return rows[:1]
    first = starts[0]
    last = next(i for i in range(first, len(rows)) if re.search(r":\s*(#.*)?$", rows[i]))
    return rows[first : last + 1]
