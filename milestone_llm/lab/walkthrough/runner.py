"""Walkthroughs: a debugger session that carries its own guide.

A milestone's `guide.txt` is the guide, its `walkthrough.py` the scenario: lines that build an
engine and let it work. `python -m m1_single.walkthrough` runs them under a real pdb that stops at
each stop in order. With `--ask`, one can guess values first. `--auto` prints the same cards without
a prompt, and fails where the guide does not fit the code.
"""

from __future__ import annotations

import argparse
import importlib.util
import pdb
import sys
from collections.abc import Callable, Sequence
from typing import Any

from milestone_llm.cli import ended_in_one_line

from .debugger import GuidedPdb
from .guide import Guide, parse_guide

HOW_TO = (
    "{} stops. At each you are in pdb: p EXPRESSION prints, n and s go a line on, u and d move in "
    "the stack, w shows it, l lists the source, c goes to the next stop, q leaves, h helps."
)


def run_walkthrough(
    text: str, scenario: Callable[[], Any], argv: Sequence[str] | None = None
) -> int:
    """Run `scenario` and stop where the guide says.

    Args:
        text: the guide, in the form of guide.py.
        scenario: builds an engine and lets it work. Runs again from its start on pdb's `restart`.
        argv: `--auto`, `--ask`, `--from-stop` and `--list`; None takes the command line's.

    Returns:
        The exit code: 1 if a value differs from the expected one or a stop is not reached, else 0.
    """
    guide = parse_guide(text)
    spec = sys.modules["__main__"].__spec__  # None for a script
    prog = f"python -m {spec.name}" if spec else None
    parser = argparse.ArgumentParser(prog, description=guide.title)
    parser.add_argument("--auto", action="store_true", help="no prompt; fail on a difference")
    parser.add_argument("--ask", action="store_true", help="guess values before they are shown")
    parser.add_argument(
        "--from-stop",
        type=int,
        choices=range(1, len(guide.stops) + 1),
        default=1,
        metavar="N",
        help="run on to stop N of --list",
    )
    parser.add_argument("--list", action="store_true", help="list the stops and leave")
    options = parser.parse_args(argv)
    return ended_in_one_line(lambda: _walk(guide, scenario, options))


def _walk(guide: Guide, scenario: Callable[[], Any], options: argparse.Namespace) -> int:
    from milestone_llm.trace.text import plural

    from .card import CardPrinter

    if not options.list and importlib.util.find_spec("transformers") is None:
        raise ModuleNotFoundError("the scenario needs an engine", name="transformers")
    is_auto = options.auto or sys.stdin is None
    CardPrinter(guide).start()
    if options.list:
        CardPrinter(guide).list_stops()
        return 0
    if not is_auto:
        CardPrinter(guide).paragraph(HOW_TO.format(len(guide.stops)))
    while True:
        cards = CardPrinter(guide, options.ask and not is_auto)
        try:
            debugger = GuidedPdb(guide.stops, cards.card, is_auto, options.from_stop)
            debugger.follow(scenario)
            break
        except pdb.Restart:
            cards.paragraph("From the start again.")
        except KeyboardInterrupt:
            cards.paragraph("Interrupted.")
            return 130
    if cards.guesses:
        cards.paragraph(f"{sum(cards.guesses)} of {len(cards.guesses)} guesses were right.")
    if debugger.quitting:
        left = f"Left after stop {debugger.num_passed} of {len(guide.stops)}."
        cards.paragraph(f"{left} --from-stop {debugger.num_passed} comes back to it.")
        return 0
    if failures := cards.failures + debugger.broken_hints + debugger.unreached():
        print("The walkthrough does not fit the code:", *failures, sep="\n  ", file=sys.stderr)
        return 1
    cards.line()
    cards.heading("The end")
    stops = plural(len(guide.stops) + 1 - options.from_stop, "stop")
    values = plural(cards.num_expected, "value")
    cards.line(f"{stops}, {values} as expected." if cards.num_expected else f"{stops} reached.")
    return 0
