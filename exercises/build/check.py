"""Courses and their steps. A course is a folder with files to write and a list of steps; a step is
a task with a check that explains what is wrong.

`steps.py` of a course has `TITLE` and `DONE`, its steps in order, and, if the reader's files are
made from a milestone's, `MILESTONE` and `FILES`. A check gets the `Parts` that the reader has
written and raises `Wrong` with what it saw, what it expected and why. The milestone's own parts
have to pass, too: the steps are its tests (`tests/test_rules.py`).
"""

from __future__ import annotations

import contextlib
import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from milestone_llm import how_to_install

from .skeleton import File

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]

FILE_OF = {
    "Scheduler": "scheduler",
    "BlockPool": "block_pool",
    "BlockManager": "block_manager",
    "KVCacheManager": "kv_cache_manager",
    "CachingBlockPool": "caching_pool",
    "PrefixCache": "prefix_cache",
    "hash_block": "prefix_cache",  # prefix_cache imports it
    "Replica": "router",
    "Router": "router",
}
"""The file of a course in which each part is written."""


class Wrong(Exception):  # noqa: N818
    """The reader's code is wrong. The message says what, in words for the reader."""


class Parts:
    """Classes and functions of a course by name: the reader's, or those of a milestone.

    Args:
        package: `exercises.build.m2`, or `m2_batching`, whose files have the same names.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self.scheduler_path = str(ROOT.joinpath(*package.split("."), "scheduler.py"))
        """The file that an engine takes as `scheduler=`."""

    def __getattr__(self, name: str) -> Any:
        if name not in FILE_OF:
            raise AttributeError(name)
        return getattr(self.module(FILE_OF[name]), name)

    def module(self, file: str) -> Any:
        """Import one of the files, by its name without `.py`."""
        return importlib.import_module(f"{self.package}.{file}")


@dataclass(frozen=True)
class Step:
    """One thing to write, and the check that says whether it is right."""

    title: str
    file: str
    """The file to write in, in the course's folder."""
    check: Callable[[Parts], None]
    needs_model: bool = False
    """Whether the check needs torch, which a browser does not have."""

    @property
    def task(self) -> str:
        """The task in a few sentences: the docstring of the check."""
        return " ".join((self.check.__doc__ or "").split())

    @property
    def seconds(self) -> int:
        """Seconds of CPU time after which the check counts as an endless loop."""
        return 100 if self.needs_model else 10


def step(
    title: str, file: str, needs_model: bool = False
) -> Callable[[Callable[[Parts], None]], Step]:
    """Return a decorator that makes a step of a check."""
    return lambda check: Step(title, file, check, needs_model)


@dataclass(frozen=True)
class Course:
    """A folder below this one that has steps."""

    name: str
    title: str
    steps: list[Step]
    done: str
    """Text for the reader when all steps pass: what to do next."""
    milestone: str
    """The package that the reader writes anew; empty if there is none."""
    files: list[File]

    @classmethod
    def named(cls, name: str) -> Course:
        """Load the course in the folder `name`."""
        module = importlib.import_module(f"{__package__}.{name}.steps")
        milestone, files = getattr(module, "MILESTONE", ""), getattr(module, "FILES", [])
        steps = [each for each in vars(module).values() if isinstance(each, Step)]
        return cls(name, module.TITLE, steps, module.DONE, milestone, files)

    @property
    def parts(self) -> Parts:
        """The parts that the reader has written."""
        return Parts(f"{__package__}.{self.name}")

    def texts(self) -> dict[str, str]:
        """Return the reader's files as they are at the beginning, by path from the root."""
        folder = (FOLDER / self.name).relative_to(ROOT)
        own = {
            each.module: f"{self.parts.package}.{PurePath(each.name).stem}" for each in self.files
        }
        return {
            (folder / each.name).as_posix(): each.text(
                (ROOT / each.source).read_text(encoding="utf-8"), own
            )
            for each in self.files
        }

    def missing(self) -> dict[str, str]:
        """Return the reader's files that are not there yet, by path from the root."""
        return {path: text for path, text in self.texts().items() if not (ROOT / path).exists()}

    def path(self, step: Step) -> str:
        """Return the file in which a step is written, from the root of the repository."""
        return (FOLDER / self.name / step.file).relative_to(ROOT).as_posix()


def course_names() -> list[str]:
    """Return the names of all courses, sorted."""
    return sorted(path.parent.name for path in FOLDER.glob("*/steps.py"))


def problem(step: Step, parts: Parts) -> str | None:
    """Return what is wrong with a step, in words; None if it passes."""
    try:
        step.check(parts)
    except NotImplementedError as error:
        return explained(error) if error.args else _unexpected(error)
    except Wrong as wrong:
        return str(wrong)
    except Exception as error:
        return explained(error)
    return None


def explained(error: Exception) -> str:
    """Explain an exception of the reader's code: what was raised, and at which line of theirs."""
    frames: dict[str, traceback.FrameSummary] = {}  # the innermost frame of each of their files
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        is_comprehension = frame.name.endswith(("comp>", "genexpr>"))
        if path.parent.parent == FOLDER and path.name != "steps.py" and not is_comprehension:
            frames.pop(frame.filename, None)
            frames[frame.filename] = frame
    if isinstance(error, SyntaxError) and error.filename:
        place = _relative(error.filename)
        return f"{place}, line {error.lineno}, is no Python: {error.msg}\n    {error.text or ''}"
    if not frames:
        return _unexpected(error)
    last, *callers = reversed(frames.values())
    if isinstance(error, NotImplementedError):
        return f"Not written yet: {_place(last)}.\nHint: {error}"
    lines = [f"{type(error).__name__}: {error}", f"raised in {_place(last)}:", f"    {last.line}"]
    for frame in callers:
        lines += [f"called by {_place(frame)}:", f"    {frame.line}"]
    return "\n".join(lines)


def _place(frame: traceback.FrameSummary) -> str:
    name = "" if frame.name == "<module>" else f"{frame.name}() in "
    return f"{name}{_relative(frame.filename)}, line {frame.lineno}"


def _unexpected(error: Exception) -> str:
    """Return all of an exception that did not come through the reader's files; for a library that
    is not installed, how to install it."""
    if isinstance(error, ModuleNotFoundError):
        with contextlib.suppress(ModuleNotFoundError):  # raised again for a library not of ours
            return how_to_install(error)
    return f"{type(error).__name__}: {error}\n{''.join(traceback.format_exception(error)[-4:])}"


def _relative(path: str) -> str:
    return Path(path).relative_to(ROOT).as_posix() if ROOT in Path(path).parents else path
