"""Show an exhibit in the form that the options ask for: on the terminal, as a page, in the
debugger."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from milestone_llm.consoles import console
from milestone_llm.lab.explorer.page import Run as PageRun
from milestone_llm.lab.explorer.page import write_page
from milestone_llm.lab.walkthrough.runner import run_walkthrough

from . import show
from .exhibit import Exhibit, Run
from .rooms import BY_SYMPTOM, NAMES, SYMPTOMS, exhibit


def visit(name: str, args: argparse.Namespace) -> int:
    """Show one exhibit in the form that the options ask for."""
    own = exhibit(name)
    if args.walkthrough:
        return walk(name, own)
    runs = own.run(is_changed=False), own.run(is_changed=True)
    suspect = runs[0] if own.is_false_alarm else runs[1]
    if args.explore:
        write(own, runs, suspect, args.explore)
        return 0
    if args.card:
        show.heading(name)
        show.card(name, own, suspect)
        return 0
    show.traffic(name, own)
    show.trace(own, suspect)
    show.outcome(own, *runs)
    show.question(own)
    if sys.stdin.isatty():
        console.input("\nEnter shows the card. ")
        show.card(name, own, suspect)
    else:
        show.say(f"\nThe card: python -m exercises.museum {NAMES.index(name) + 1} --card", "dim")
    return 0


def write(own: Exhibit, runs: tuple[Run, Run], suspect: Run, path: Path) -> None:
    """Write the page of both runs, in which the step to look at is marked."""
    step, _ = next(own.invariant(suspect))
    pages = [
        PageRun.of(title, run.engine, step if run is suspect else None)
        for run, title in zip(runs, show.TITLES, strict=True)
    ]
    write_page(pages, path)
    console.print(f"page: {path}", markup=False, soft_wrap=True)


def walk(name: str, own: Exhibit) -> int:
    """Run the debugger, which stops at the line where it goes wrong."""
    title, where = "What looks wrong", f"This is {own.milestone} as it is."
    if not own.is_false_alarm:
        where = f"In exercises/museum/{name}.py one method is not that of {own.milestone}."
        title = "Where it goes wrong"
    guide = f"{SYMPTOMS[name]}\n\n{where}\n\n# {title}\n{own.walk.strip()}"
    is_asked = sys.stdin is not None and sys.stdin.isatty()
    return run_walkthrough(guide, own.suspect, [] if is_asked else ["--auto"])


def by_symptom() -> None:
    """Print for every exhibit its command, what is wrong, and the result of the engine's own
    check."""
    for symptom, names in BY_SYMPTOM.items():
        show.say(symptom, "bold")
        for name in names:
            own = exhibit(name)
            run = own.suspect()
            show.say(f"  {SYMPTOMS[name]}")
            show.say(f"    $ python -m exercises.museum {NAMES.index(name) + 1}")
            show.say(f"    {show.finding(own, run)}")
            show.say(f"    check_invariants: {run.check or 'nothing'}")
        show.say("")
