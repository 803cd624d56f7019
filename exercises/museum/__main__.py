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
from pathlib import Path

from milestone_llm.cli import ended_in_one_line, new_file, run_command

from .rooms import NAMES


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
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
    args.threads = 1  # a tiny model: more threads would only wait for each other
    if args.number is not None and not 1 <= args.number <= len(NAMES):
        parser.error(f"the exhibits are 1 to {len(NAMES)}, got {args.number}")
    if args.number is None and not args.all:
        return ended_in_one_line(rooms)  # they need no model
    return run_command(visit, args)


def rooms() -> None:
    """List the exhibits."""
    from . import show

    show.rooms()


def visit(args: argparse.Namespace) -> int | None:
    """Show all exhibits by symptom, or one."""
    from .visit import by_symptom, visit

    if args.all:
        by_symptom()
        return None
    return visit(NAMES[args.number - 1], args)


if __name__ == "__main__":
    sys.exit(main())
