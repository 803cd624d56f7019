"""A museum of bugs: engines in which one method was changed. What is wrong, if anything?

python -m exercises.museum                  the rooms
python -m exercises.museum 3                an exhibit: traffic, trace and question
python -m exercises.museum 3 --explore      a page with this run and a correct one side by side
python -m exercises.museum 3 --walkthrough  the debugger at the line in question
python -m exercises.museum 3 --card         what it was
python -m exercises.museum --all            what is wrong with every trace
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from milestone_llm.command.cli import console, new_file, run_command
from milestone_llm.lab.trace.explore import Run as PageRun
from milestone_llm.lab.trace.explore import write_page
from milestone_llm.lab.walkthrough.runner import run_walkthrough

from . import show
from .exhibit import Exhibit, Run
from .rooms import BY_SYMPTOM, NAMES, SYMPTOMS, exhibit


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m exercises.museum",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("number", nargs="?", type=int, help="of an exhibit; the rooms, if left out")
    add("--all", action="store_true", help="run all; print what is wrong with each trace")
    add("--card", action="store_true", help="show the card alone")
    meaning = "write the page of both runs there (runs/museum.html if not given)"
    path = Path("runs/museum.html")
    add("--explore", nargs="?", const=path, type=new_file, metavar="PATH.html", help=meaning)
    add("--walkthrough", action="store_true", help="stop in pdb at the line in question")
    args = parser.parse_args(arguments)
    args.threads = 1  # a tiny model: more would only wait for one another
    if args.number is not None and not 1 <= args.number <= len(NAMES):
        parser.error(f"the exhibits are 1 to {len(NAMES)}, got {args.number}")
    if args.all:
        return run_command(lambda args: by_symptom(), args)
    if args.number is None:
        show.rooms()
        return 0
    return run_command(partial(visit, NAMES[args.number - 1]), args)


def visit(name: str, args: argparse.Namespace) -> int:
    """One exhibit in the way that was asked for."""
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
    """The page of both runs, in which the step to look at is framed."""
    step, _ = next(own.invariant(suspect))
    pages = [
        PageRun.of(title, run.engine, step if run is suspect else None)
        for run, title in zip(runs, show.TITLES, strict=True)
    ]
    write_page(pages, path)
    console.print(f"page: {path}", markup=False, soft_wrap=True)


def walk(name: str, own: Exhibit) -> int:
    """The debugger at the line where it goes wrong."""
    title, where = "What looks wrong", f"This is {own.milestone} as it is."
    if not own.is_false_alarm:
        where = f"In exercises/museum/{name}.py one method is not that of {own.milestone}."
        title = "Where it goes wrong"
    guide = f"{SYMPTOMS[name]}\n\n{where}\n\n# {title}\n{own.walk.strip()}"
    is_asked = sys.stdin is not None and sys.stdin.isatty()
    return run_walkthrough(guide, own.suspect, [] if is_asked else ["--auto"])


def by_symptom() -> None:
    """Of every exhibit the command, what is wrong, and what the engine's own check says."""
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


if __name__ == "__main__":
    sys.exit(main())
