"""Build the engine, step by step: the model, what M2, M3 and M4 add, kernels, several processes.

python -m exercises.build            how far you are in every course
python -m exercises.build m2         check M2's steps in order, up to the first that fails
python -m exercises.build m2 3       check step 3 alone

The first time, a course writes the files that you are to complete into its folder. What is there is
never written over; a file that you delete is written anew.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

from milestone_llm import how_to_install
from milestone_llm.cli import ended_in_one_line

from .check import ROOT, Course, Step, course_names, problem


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status: 0 if all that was checked passes, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m exercises.build",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("course", nargs="?", choices=course_names(), help="all, if left out")
    parser.add_argument("step", nargs="?", type=int, help="its number; all, if left out")
    args = parser.parse_args(arguments)

    def body() -> int:
        if args.course is None:
            return progress()
        from milestone_llm.consoles import log_console

        log_console.print(f"Loading the course {args.course}.", style="dim")
        course = Course.named(args.course)
        if args.step is not None and not 1 <= args.step <= len(course.steps):
            parser.error(f"{course.name} has the steps 1 to {len(course.steps)}, got {args.step}")
        begin(course)
        return check_in_order(course) if args.step is None else check(course, args.step)

    return ended_in_one_line(body)


def say(text: str, **options: Any) -> None:
    """Print text as it is."""
    from milestone_llm.consoles import console

    console.print(text, markup=False, **options)


def begin(course: Course) -> None:
    """Write the reader's files that are missing."""
    missing = course.missing()
    for path, text in missing.items():
        (ROOT / path).write_text(text, encoding="utf-8")
    if missing:
        say("These files are yours now. Each function that raises NotImplementedError")
        say(f"is to be written, and says how: {', '.join(missing)}\n", soft_wrap=True)


def progress() -> int:
    """Print which steps pass, in every course, up to the first that does not. Returns 0 if all
    pass, else 1."""
    is_done = True
    for name in course_names():
        try:
            course = Course.named(name)
        except ModuleNotFoundError as error:
            say(f"{name}  {how_to_install(error)}")
            is_done = False
            continue
        say(f"{name}  {course.title}", style="bold")
        mark, is_begun = "passes", not course.missing()
        for number, step in enumerate(course.steps, 1):
            command = ""
            if mark != "passes":
                mark = ""
            elif not is_begun or problem_in_time(course, step) is not None:
                mark, is_done = "next", False
                command = f"\n     python -m exercises.build {name} {number}"
            line = f"  {number:<4}{step.title:<44}{step.file:<19}{mark}"
            say(f"{line.rstrip()}{command}")
    return 0 if is_done else 1


def check_in_order(course: Course) -> int:
    """Check the steps of one course, up to the first that fails. Returns 0 if all pass, else 1."""
    for number in range(1, len(course.steps) + 1):
        if check(course, number):
            return 1
    return 0


def check(course: Course, number: int) -> int:
    """Check one step. Print its task and what is wrong, or that it passes and what comes next."""
    step = course.steps[number - 1]
    name = f"{course.name}, step {number} of {len(course.steps)}: {step.title}"
    found = problem_in_time(course, step)
    if found is None:
        say(f"{name}  passes", style="green")
        if number == len(course.steps):
            say(f"\n{course.done}", soft_wrap=True)
        return 0
    say(f"{name}\n", style="bold")
    say(f"{step.task}\nYou write it in {course.path(step)}.\n", style="dim")
    say(found)
    say(f"\nCheck again: python -m exercises.build {course.name} {number}", style="dim")
    return 1


def problem_in_time(course: Course, step: Step) -> str | None:
    """Return what is wrong with a step; an endless loop is stopped where it is."""
    with _stopped_after(step.seconds):
        return problem(step, course.parts)


@contextlib.contextmanager
def _stopped_after(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError in the block after this many seconds of CPU time."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"no end after {seconds} s: does a loop go on for ever?")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


if __name__ == "__main__":
    # Kernels run on the CPU, unless the reader says otherwise. Triton reads this at its import.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.exit(main())
