"""Ctrl-C at a line of one's choice."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]
OUTSIDE = ("sampling.py", "tracer.py", "records.py", "outputs.py")


class Interrupter:
    """Raises `KeyboardInterrupt` at the n-th line that the engine's own files run."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.num_lines = 0
        self.where = ""

    def __enter__(self) -> Interrupter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        is_ours = path.startswith(str(ROOT)) and "/tests/" not in path and ".venv" not in path
        return self._line if is_ours and not path.endswith(OUTSIDE) else None

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        path = frame.f_code.co_filename
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                self.where = f"{frame.f_code.co_name} in {Path(path).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self._line
