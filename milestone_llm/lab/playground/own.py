"""The reader's own scheduler: loaded again when its file was saved, stopped if it never ends."""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from milestone_llm import MILESTONES
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.own_code import milestone_of
from milestone_llm.frontend.scheduler_file import scheduler_class

SECONDS = 5.0  # for a run


@dataclass(frozen=True)
class OwnScheduler:
    """One version of it, in place of a milestone's."""

    milestone: str
    path: Path
    loaded: type[BaseScheduler] | Exception
    """The class, or what is wrong with the file."""

    @contextlib.contextmanager
    def stopped_in_time(self) -> Iterator[None]:
        """Within, a line of a file in the folder raises a TimeoutError when time is up."""
        end = time.monotonic() + SECONDS
        is_own = functools.cache(lambda file: Path(file).parent == self.path.parent)

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            if time.monotonic() > end:
                raise TimeoutError(f"stopped after {SECONDS:.0f} s")
            return on_line

        def on_call(frame: FrameType, event: str, argument: Any) -> Any:
            return on_line if is_own(frame.f_code.co_filename) else None

        before = sys.gettrace()  # a debugger has all the time it wants
        sys.settrace(before or on_call)
        try:
            yield
        finally:
            sys.settrace(before)


Own = Mapping[str, OwnScheduler]  # by `Side.engine`
NO_OWN: Own = {}


class OwnFile:
    """A file that is looked at again and again, and what lies beside it: it may import that."""

    def __init__(self, path: Path) -> None:
        self.path, self.milestone = path.resolve(), "m4_prefix_chunked"
        with contextlib.suppress(SyntaxError):  # which the page will show
            self.milestone = milestone_of(self.path)
        self.version, self.versions, self._saved = 0, NO_OWN, [0]
        self._lock = threading.Lock()

    def refresh(self) -> Own:
        """Its newest version and the one before; loaded again if it was saved since."""
        with self._lock:
            files = [each for each in self.path.parent.glob("*.py") if each.exists()]
            saved = [each.stat().st_mtime_ns for each in sorted(files)]
            if saved != self._saved:
                self._saved, self.version = saved, self.version + 1
                new = OwnScheduler(self.milestone, self.path, self._loaded())
                self.versions = {"own before": self.versions.get("own", new), "own": new}
            return self.versions

    def _loaded(self) -> type[BaseScheduler] | Exception:
        theirs = importlib.import_module(f"{self.milestone}.scheduler").Scheduler
        for name, module in list(sys.modules.items()):
            is_beside = Path(getattr(module, "__file__", None) or "").parent == self.path.parent
            if is_beside and name.partition(".")[0] not in (*MILESTONES, "milestone_llm"):
                del sys.modules[name]
        try:
            found: type[BaseScheduler] = scheduler_class(str(self.path), theirs)
        except Exception as error:
            return error
        return found
