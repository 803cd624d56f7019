"""Load a reader's class in place of a milestone's: a scheduler, a block manager, a prefix cache.

A copy of a milestone's file will do: `from .block_manager import ...` still means that milestone's.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import itertools
import linecache
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, cast

from milestone_llm import MILESTONES
from milestone_llm.core.errors import InputError
from milestone_llm.core.scheduler import BaseScheduler

_numbers = itertools.count()
SchedulerType = TypeVar("SchedulerType", bound=BaseScheduler)


def scheduler_class(path: str | None, default: type[SchedulerType]) -> type[SchedulerType]:
    """Return the class of the scheduler in a file; without a file, the milestone's own class.

    Args:
        default: the milestone's class. Both classes are made with the same arguments.

    Raises:
        InputError: the file cannot be read, has no scheduler, or has one of another milestone.
        Exception: what the file itself raises.
    """
    if path is None:
        return default
    own = load_class(Path(path), "Scheduler", BaseScheduler)
    wanted = inspect.signature(default).parameters
    if not _takes(own, wanted):
        raise InputError(
            f"{path}: {own.__name__} is made of ({', '.join(inspect.signature(own).parameters)}), "
            f"but the scheduler of {default.__module__.partition('.')[0]} of "
            f"({', '.join(wanted)}): it is of another milestone"
        )
    return cast("type[SchedulerType]", own)


def _takes(own: type, names: Iterable[str]) -> bool:
    """Whether a class can be made with arguments of these names, or with any (`*args`)."""
    try:
        bound = inspect.signature(own).bind(*names).arguments
    except TypeError:
        return False
    return all(name == given or isinstance(given, tuple) for name, given in bound.items())


def load_class(path: Path, name: str, base: type = object) -> type[Any]:
    """Return the class `name` of a file, or the only subclass of `base` in it. The file is read
    anew each time.

    Raises:
        InputError: the file cannot be read, or it is not clear which class is meant.
        Exception: what the file itself raises; `place_of` finds its line.
    """
    source, path = _source(path), path.resolve()
    code = compile(source, str(path), "exec")  # Python's cache sees only whole seconds
    module = ModuleType(f"{path.stem}_{next(_numbers)}")  # each version has classes of its own
    module.__file__, module.__package__ = str(path), milestone_of(path)
    sys.modules[module.__name__] = module  # dataclasses look there
    exec(code, vars(module))
    classes = [own for own in vars(module).values() if isinstance(own, type)]
    found = [own for own in classes if own.__module__ == module.__name__ and issubclass(own, base)]
    chosen = [own for own in found if own.__name__ == name] or found
    if len(chosen) != 1:
        names = ", ".join(own.__name__ for own in found) or "none"
        wanted = f"one class {name}, derived from {base.__name__}"
        raise InputError(f"{path} must define {wanted}; it defines {names}")
    return chosen[0]


def milestone_of(path: Path) -> str:
    """Return the milestone that a file is a copy of, or else the newest one that it imports.

    Raises:
        InputError: the file cannot be read.
        SyntaxError: the file is not Python.
    """
    source = _source(path)
    tree = ast.parse(source, str(path))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    relative = [node.module for node in imports if node.level and node.module]
    absolute = {(node.module or "").split(".")[0] for node in imports if not node.level}
    if relative and (able := [each for each in MILESTONES if _has_modules(each, relative)]):
        return max(able, key=lambda milestone: _num_common_lines(milestone, source))
    return max(absolute & set(MILESTONES), default=MILESTONES[0])


def place_of(error: BaseException, folder: Path | None = None) -> str:
    """Return the last line that an exception came through, in a file of the folder if possible."""
    if isinstance(error, SyntaxError):
        return (
            f"{Path(error.filename or '').name}, line {error.lineno}: {(error.text or '').strip()}"
        )
    linecache.checkcache()
    frames = traceback.extract_tb(error.__traceback__)
    last = ([each for each in frames if Path(each.filename).parent == folder] or frames)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}: {last.line}"


def _has_modules(milestone: str, names: list[str]) -> bool:
    """Whether a file of this milestone could import these modules relatively. The playground in a
    browser has no M5."""
    return importlib.util.find_spec(milestone) is not None and all(
        importlib.util.find_spec(f"{milestone}.{name}") for name in names
    )


def _num_common_lines(milestone: str, source: str) -> int:
    """Return how many different lines a file has in common with the milestone's scheduler. A file
    is most likely a copy of a scheduler."""
    spec = importlib.util.find_spec(f"{milestone}.scheduler")
    theirs = _source(Path(spec.origin)) if spec and spec.origin else ""
    return len({*source.splitlines()} & {*theirs.splitlines()})


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (
        OSError,
        ValueError,
    ) as error:  # no such file, no UTF-8, or no name that a file can have
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}") from None
