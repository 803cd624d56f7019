"""The command line of every demo. It imports no torch, so that `--help` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from milestone_llm.cli import (
    Formatter,
    add_options,
    positive,
    run_command,
    say_that_it_loads,
    try_to_write,
)
from milestone_llm.core.errors import InputError
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.custom_scheduler import load_class, place_of


def demo_parser(milestone: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every demo."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {milestone}.demo", description=description, formatter_class=Formatter
    )
    add = parser.add_argument
    add_options(parser, "model")
    add("--prompts", nargs="+", metavar="TEXT", help="your own instead of the demo's")
    meaning = "output tokens of every request instead of the demo's own, unless EOS comes before"
    add("--max-tokens", type=positive, metavar="N", help=meaning)
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add_options(parser, "max-num-seqs", "seed", "threads", "trace", "explore", "out")
    meaning = "your own in place of the milestone's: a file with a class Scheduler"
    add("--scheduler", metavar="PATH.py", help=meaning)
    return parser


def numbers(minimum: int) -> Callable[[str], list[int]]:
    """Return an argparse type: whole numbers separated by commas, none below `minimum`."""

    def parse(text: str) -> list[int]:
        values = [int(part) for part in text.split(",")]
        if min(values) < minimum:
            raise argparse.ArgumentTypeError(f"{min(values)} is below {minimum}")
        return values

    parse.__name__ = "list of numbers"
    return parse


def run_demo(
    demo: Callable[[argparse.Namespace], int | None],
    args: argparse.Namespace,
    pictures: Sequence[str],
    *,
    seconds: int,
) -> int:
    """Run a demo. First check its files, so that an error comes before the model is loaded.

    Args:
        pictures: names of the files that it writes to `--out`.
        seconds: duration with its own options on two idle CPU cores, which is printed.

    Returns:
        The exit status.
    """

    def before(args: argparse.Namespace) -> None:
        from milestone_llm.trace.tracer import trace_path

        paths = [args.out / picture for picture in pictures]
        for path in filter(None, [*paths, args.explore, trace_path(args.trace)]):
            try_to_write(path)
        if args.scheduler is not None:
            try_scheduler(Path(args.scheduler))
        say_that_it_loads(args)
        args.seconds = seconds
        args.check_invariants = args.scheduler is not None

    return run_command(demo, args, before)


def try_scheduler(path: Path) -> None:
    """Check that a file has a scheduler, before a model is loaded.

    Raises:
        InputError: it has none, cannot be read, or is not valid Python.
        Exception: any error that the file itself raises.
    """
    try:
        load_class(path, "Scheduler", BaseScheduler)
    except SyntaxError as error:
        raise InputError(f"--scheduler: {error.msg}; mend {place_of(error)}") from None
    except InputError as error:
        begin = "begin with a copy of the milestone's scheduler.py"
        raise InputError(f"--scheduler: {error}; {begin}") from None
