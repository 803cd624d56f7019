"""A reader's own class in place of a milestone's: a scheduler, a block manager, a prefix cache.

A copy of a milestone's file will do: `from .block_manager import ...` still means that milestone's.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import linecache
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from milestone_llm import MILESTONES
from milestone_llm.core.errors import InputError

_numbers = itertools.count()


def own_class(path: Path, name: str, base: type = object) -> type[Any]:
    """The class `name` of a file, or the only subclass of `base` in it. It is read anew each time.

    Raises:
        InputError: the file cannot be read, or it is not clear which class is meant.
        Exception: what the file itself raises; `place_of` finds its line.
    """
    source, path = _source(path), path.resolve()
    code = compile(source, str(path), "exec")  # Python's cache sees whole seconds alone
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
    """The milestone that a file is a copy of, or else the newest one that it imports.

    Raises:
        InputError: the file cannot be read.
        SyntaxError: it is no Python.
    """
    tree = ast.parse(_source(path), str(path))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    relative = [node.module for node in imports if node.level and node.module]
    absolute = {(node.module or "").split(".")[0] for node in imports if not node.level}
    for milestone in MILESTONES if relative else ():
        if all(importlib.util.find_spec(f"{milestone}.{name}") for name in relative):
            return milestone
    return max(absolute & set(MILESTONES), default=MILESTONES[0])


def place_of(error: BaseException, folder: Path | None = None) -> str:
    """The last line that an exception came through: of a file in the folder, if there is one."""
    if isinstance(error, SyntaxError):
        return (
            f"{Path(error.filename or '').name}, line {error.lineno}: {(error.text or '').strip()}"
        )
    linecache.checkcache()
    frames = traceback.extract_tb(error.__traceback__)
    last = ([each for each in frames if Path(each.filename).parent == folder] or frames)[-1]
    return f"{Path(last.filename).name}, line {last.lineno}: {last.line}"


def _source(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (
        OSError,
        ValueError,
    ) as error:  # no such file, no UTF-8, or no name that a file can have
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot read {path}: {reason}") from None
