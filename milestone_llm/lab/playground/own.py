"""The reader's own scheduler: a file that is loaded again after it was saved."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from milestone_llm import MILESTONES
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.custom_scheduler import milestone_of, scheduler_class

from .setting import Setting
from .simulate import Outcome, Own, OwnScheduler, run_side


class Version:
    """A version of the file, and whether it has ever run to the end."""

    def __init__(self, scheduler: OwnScheduler) -> None:
        self.scheduler, self.has_run = scheduler, False

    def run(self, setting: Setting, index: int) -> Outcome:
        """Run a side of the setting."""
        outcome = self.scheduler.run(setting, index)
        self.has_run |= not outcome.problem
        return outcome


class OwnFile:
    """A file that is checked for changes, with the other files of its folder, which it may import.

    Args:
        version_class: runs a version of the file, in this process or another.
    """

    def __init__(self, path: Path, version_class: Callable[[str, Path], OwnScheduler]) -> None:
        self.path, self.milestone = path.resolve(), "m4_prefix_chunked"
        with contextlib.suppress(SyntaxError):  # the page will show the error
            self.milestone = milestone_of(self.path)
        self.version, self._saved = 0, [0]
        self._versions: dict[str, Version] = {}
        self._version_class = version_class
        self._lock = threading.Lock()

    def refresh(self) -> Own:
        """Return its newest version, and the last one before it that ran to the end. Load the file
        again if it was saved since."""
        with self._lock:
            files = [each for each in self.path.parent.glob("*.py") if each.exists()]
            saved = [each.stat().st_mtime_ns for each in sorted(files)]
            if saved != self._saved:
                self._saved, self.version = saved, self.version + 1
                new = Version(self._version_class(self.milestone, self.path))
                ran = [each for each in reversed(self._versions.values()) if each.has_run]
                self._versions = {"own before": [*ran, new][0], "own": new}
            return self._versions


class Here:
    """A version that runs in this process. The caller has to stop it if it does not end."""

    def __init__(self, milestone: str, path: Path) -> None:
        self.milestone, self.path = milestone, path
        self.loaded = _loaded(milestone, path)

    def run(self, setting: Setting, index: int) -> Outcome:
        """Run a side of a setting with this scheduler."""
        return run_side(setting, index, self.milestone, self.loaded, self.path.parent)


def _loaded(milestone: str, path: Path) -> type[BaseScheduler] | BaseException:
    """Return the class in the file, or the exception that loading it raised."""
    theirs = importlib.import_module(f"{milestone}.scheduler").Scheduler
    for name, module in list(sys.modules.items()):
        is_beside = Path(getattr(module, "__file__", None) or "").parent == path.parent
        if is_beside and name.partition(".")[0] not in (*MILESTONES, "milestone_llm", "__main__"):
            del sys.modules[name]
    try:
        found: type[BaseScheduler] = scheduler_class(str(path), theirs)
    except BaseException as error:  # SystemExit, too
        return error
    return found
