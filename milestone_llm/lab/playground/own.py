"""The reader's own scheduler: a file that is loaded again when it was saved."""

from __future__ import annotations

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from milestone_llm import MILESTONES
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.own_code import milestone_of
from milestone_llm.frontend.scheduler_file import scheduler_class

from .setting import Setting
from .simulate import NO_OWN, Outcome, Own, OwnScheduler, run_side


class OwnFile:
    """A file that is looked at again and again, and what lies beside it: it may import that.

    Args:
        version_class: where its versions run.
    """

    def __init__(self, path: Path, version_class: Callable[[str, Path], OwnScheduler]) -> None:
        self.path, self.milestone = path.resolve(), "m4_prefix_chunked"
        with contextlib.suppress(SyntaxError):  # which the page will show
            self.milestone = milestone_of(self.path)
        self.version, self.versions, self._saved = 0, NO_OWN, [0]
        self._version_class = version_class
        self._lock = threading.Lock()

    def refresh(self) -> Own:
        """Its newest version and the one before; loaded again if it was saved since."""
        with self._lock:
            files = [each for each in self.path.parent.glob("*.py") if each.exists()]
            saved = [each.stat().st_mtime_ns for each in sorted(files)]
            if saved != self._saved:
                self._saved, self.version = saved, self.version + 1
                new = self._version_class(self.milestone, self.path)
                self.versions = {"own before": self.versions.get("own", new), "own": new}
            return self.versions


class Here:
    """A version in this process: whoever calls must end what does not end."""

    def __init__(self, milestone: str, path: Path) -> None:
        self.milestone, self.path = milestone, path
        self.loaded = _loaded(milestone, path)

    def run(self, setting: Setting, index: int) -> Outcome:
        """A side of a setting, with this scheduler."""
        return run_side(setting, index, self.milestone, self.loaded, self.path.parent)


def _loaded(milestone: str, path: Path) -> type[BaseScheduler] | BaseException:
    """The class of the file, or what is wrong with it."""
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
