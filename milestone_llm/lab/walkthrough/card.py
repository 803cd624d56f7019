"""The output of a walkthrough: its introduction, and a card at each stop.

A card has no time, address or absolute path, and at most 80 columns. So the same engine prints the
same card on every machine, and a transcript can be checked for equality.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Mapping
from typing import Any

from rich.console import Console

from .guide import Guide, Look, Stop

WIDTH = 80


class CardPrinter:
    """Prints a guide: in colour on a terminal, otherwise as plain text of 80 columns."""

    def __init__(self, guide: Guide, asks: bool = False) -> None:
        self._guide = guide
        self._asks = asks
        self.guesses: list[bool] = []
        """Whether each guess was right; values that were not guessed are left out."""
        is_terminal = sys.stdout.isatty()
        self._console = Console(force_terminal=is_terminal, emoji=False)
        self._width = min(WIDTH, self._console.width) if is_terminal else WIDTH
        self.num_expected = 0
        self.failures: list[str] = []

    def line(self, text: str = "", style: str = "", indent: int = 0, hang: int = 0) -> None:
        """Print text wrapped to the width; `hang` indents all lines after the first further."""
        wrapped = textwrap.fill(
            text,
            self._width,
            initial_indent=" " * indent,
            subsequent_indent=" " * (indent + hang),
            break_on_hyphens=False,
        )
        self._console.print(wrapped, style=style, markup=False, highlight=False, soft_wrap=True)

    def paragraph(self, text: str, style: str = "") -> None:
        """Print text with an empty line before it."""
        self.line()
        self.line(text, style)

    def heading(self, title: str) -> None:
        """Print a title in a line of dashes."""
        self.line(f"-- {title} ".ljust(self._width, "-"), "bold cyan")

    def start(self) -> None:
        """Print the title and the introduction."""
        self.heading(self._guide.title)
        for paragraph in self._guide.intro.split("\n\n"):
            self.paragraph(paragraph)
        files = dict.fromkeys(stop.location.partition("::")[0] for stop in self._guide.stops)
        self.paragraph(f"Files, in the order of the stops: {', '.join(files)}.", "cyan")

    def list_stops(self) -> None:
        """Print the locations of the stops."""
        self.line()
        for number, stop in enumerate(self._guide.stops, start=1):
            self.line(f"{number:3}. {stop.title}", "bold", hang=5)
            self.line(f"{stop.location}, on {stop.event}", indent=5, hang=2)
            if stop.when:
                self.line(f"when {stop.when}", indent=5, hang=2)

    def card(self, stop: Stop, names: Mapping[str, Any]) -> None:
        """Print the card of a stop, and record values that are not as expected."""
        number = self._guide.stops.index(stop) + 1
        self.line()
        self.heading(f"Stop {number} of {len(self._guide.stops)}: {stop.title}")
        self.line(f"{stop.location}, on {stop.event}", "bold")
        for row in _signature(stop):
            self.line(row, "green", indent=2, hang=8)
        if stop.when:
            self.line(f"stopped when {stop.when}", "dim", indent=4, hang=2)
        self.paragraph(stop.note)
        for look in stop.looks:
            shown, is_right = look.evaluate(names)
            value, style = f"= {shown}", ""
            if look.expected:
                self.num_expected += 1
                value += "   as expected" if is_right else f"   EXPECTED {look.expected}"
                style = "green" if is_right else "bold red"
            if not is_right:
                wanted = look.expected or "a value"
                failure = f"{look.expression} is {shown}, expected {wanted}"
                self.failures.append(f"stop {number} ({stop.title}): {failure}")
            self.line()
            self.line(f"p {look.expression}", "cyan", indent=2, hang=2)
            self.line(look.meaning, indent=4)
            if look.expected and self._ask(look, names) and is_right:
                value = f"= {shown}"
            self.line(value, style, indent=4, hang=2)
        self.paragraph(stop.hint, "cyan")

    def _ask(self, look: Look, names: Mapping[str, Any]) -> bool:
        """Ask for a guess of a value before it is shown. Returns whether one was given."""
        try:
            guess = input("    your guess (Enter: none): ").strip() if self._asks else ""
        except EOFError:
            guess, self._asks = "", False
            self.line()
        if guess:
            self.guesses.append(look.is_guessed(guess, names))
            self.line("right" if self.guesses[-1] else "not so", "bold", indent=4)
        return bool(guess)


def _signature(stop: Stop) -> list[str]:
    """Return the source lines from `def` to the body."""
    source = textwrap.dedent(inspect.getsource(stop.function))
    definition = ast.parse(source).body[0]
    assert isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef)
    return source.splitlines()[definition.lineno - 1 : definition.body[0].lineno - 1]
