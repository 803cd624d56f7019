"""Ctrl-C at a chosen line."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = f"{Path(__file__).parents[2]}/"
OUTSIDE = ("sampling.py", "tracer.py", "records.py", "outputs.py")


class Interrupter:
    """Raises `KeyboardInterrupt` at the n-th line that our own files run.

    Args:
        at: the first line is 1; -1: never, the lines are counted.
        files: names of the files that count; None: all that an engine's state depends on.
        look: called before each line.
    """

    def __init__(
        self,
        at: int,
        files: tuple[str, ...] | None = None,
        look: Callable[[], object] = lambda: None,
    ) -> None:
        self.at, self.files, self.look = at, files, look
        self.num_lines = 0
        self.where = ""

    def __enter__(self) -> Interrupter:
        self.before = sys.gettrace()
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(self.before)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename  # no `Path`, which would take most of the time
        is_ours = path.startswith(ROOT) and not path.startswith(("tests/", ".venv"), len(ROOT))
        name = path.rpartition("/")[2]
        counts = name not in OUTSIDE if self.files is None else name in self.files
        return self._line if is_ours and counts else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            self.num_lines += 1
            self.look()
            if self.num_lines == self.at:
                file = Path(frame.f_code.co_filename).name
                self.where = f"{frame.f_code.co_name} in {file}:{frame.f_lineno}"
                sys.settrace(self.before)
                raise KeyboardInterrupt
        return self._line
