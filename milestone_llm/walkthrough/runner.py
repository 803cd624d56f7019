"""Walkthroughs: a debugger session that carries its own guide (design section "Walkthroughs").

A milestone's `walkthrough.py` lists `Stop`s and a scenario, and calls `run_walkthrough`.
`python -m m1_single.walkthrough` runs the scenario under a real pdb that stops at each in order;
`--auto` prints the same cards without a prompt and fails where the guide no longer fits the code.
"""

from __future__ import annotations

import argparse
import contextlib
import pdb
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .card import CardPrinter, Look, Stop
from .debugger import WalkthroughDebugger

__all__ = ["Look", "Stop", "run_walkthrough"]


def run_walkthrough(
    title: str,
    intro: str,
    stops: Sequence[Stop],
    scenario: Callable[[], Any],
    argv: Sequence[str] | None = None,
) -> int:
    """Run `scenario` and stop where the walkthrough says.

    Args:
        title: heading, one line.
        intro: what the scenario does; blank lines part its paragraphs.
        stops: in the order in which they are reached; one is armed once the one before has passed.
        scenario: builds an engine and lets it work. Runs again from its start on pdb's `restart`.
        argv: `--auto` and `--list` are understood; None takes the command line's.

    Returns:
        The exit code: 1 where an expected value differs or a stop is never reached, else 0.
    """
    parser = argparse.ArgumentParser(description=title)
    parser.add_argument("--auto", action="store_true", help="no prompt; fail on a difference")
    parser.add_argument("--list", action="store_true", help="list the stops and leave")
    options = parser.parse_args(argv)
    out = CardPrinter()
    out.rule(title)
    for paragraph in intro.split("\n\n"):
        out.line()
        out.line(" ".join(paragraph.split()))
    if options.list:
        out.line()
        for number, stop in enumerate(stops, start=1):
            out.line(f"{number:3}. {stop.title}", "bold", hang=5)
            out.line(f"{stop.place}, on {stop.at}", indent=5, hang=2)
            if stop.when:
                out.line(f"when {stop.when}", indent=5, hang=2)
        return 0
    is_auto = options.auto or sys.stdin is None
    if not is_auto:
        out.line()
        out.line(
            f"{len(stops)} stops. At each you are in pdb: p EXPRESSION prints, n and s go a line "
            "on, u and d move in the stack, w shows it, l lists the source, c goes to the next "
            "stop, q leaves, h helps."
        )
    return _run_until_done(stops, scenario, out, is_auto)


def _run_until_done(
    stops: Sequence[Stop], scenario: Callable[[], Any], out: CardPrinter, is_auto: bool
) -> int:
    while True:
        debugger = WalkthroughDebugger(stops, out, is_auto)
        try:
            with _trace_function_restored():
                debugger.runcall(scenario)
        except pdb.Restart:
            out.line("From the start again.")
            continue
        except KeyboardInterrupt:
            out.line()
            out.line("Interrupted.")
            return 130
        except Exception:
            if not debugger.was_quit:  # else: what the engine made of being left midway
                raise
        break
    out.line()
    if debugger.was_quit:
        out.line(f"Left after stop {debugger.num_passed} of {len(stops)}.")
        return 0
    failures = debugger.failures + debugger.unreached()
    if not failures:
        out.rule("The end")
        out.line(f"{len(stops)} stops, {debugger.num_expected} values as expected.")
        return 0
    print("The walkthrough does not fit the code:", file=sys.stderr)
    for failure in failures:
        print(f"  {failure}", file=sys.stderr)
    return 1


@contextlib.contextmanager
def _trace_function_restored() -> Iterator[None]:
    """Give the trace function of a debugger or of coverage back afterwards."""
    before = sys.gettrace()
    try:
        yield
    finally:
        sys.settrace(before)
