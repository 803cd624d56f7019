"""Runs of the reader's scheduler, each in a process of its own.

The scheduler may loop, exit or crash when it is loaded and when it runs, and must not stop the
page's server. Processes are forked from one that has imported what they need.
"""

from __future__ import annotations

import contextlib
import faulthandler
import linecache
import multiprocessing
import pdb
import re
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from .own import Here
from .setting import ENGINES, Setting
from .simulate import Outcome

SECONDS = 5.0
"""Seconds for loading and one run."""
PROCESSES = multiprocessing.get_context("forkserver")
PRELOAD = [__name__, *(f"{name}.scheduler" for name in ENGINES)]


class InAProcess:
    """A version that runs in another process: a copy of the file and of its folder's other
    files."""

    def __init__(self, milestone: str, path: Path) -> None:
        PROCESSES.set_forkserver_preload(PRELOAD)  # has an effect before the first process only
        self.milestone = milestone
        self._copy = tempfile.TemporaryDirectory(prefix="scheduler_")
        self.path = Path(self._copy.name).resolve() / path.name
        for each in path.parent.glob("*.py"):
            with contextlib.suppress(OSError):  # it has been deleted
                shutil.copy(each, self.path.parent)

    def run(self, setting: Setting, index: int) -> Outcome:
        """Run a side of a setting with this scheduler. Errors of the scheduler are in the
        outcome."""
        ours, theirs = PROCESSES.Pipe()
        with ours, tempfile.NamedTemporaryFile("r", errors="replace") as traceback:
            arguments = (theirs, self.milestone, self.path, setting, index, traceback.name, SECONDS)
            process = PROCESSES.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            try:
                outcome: Outcome = ours.recv()
                return outcome
            except EOFError:
                process.join()
                text = traceback.read()
        problem = f"its process has ended with status {process.exitcode}"
        problem = f"stopped after {SECONDS:.0f} s" if text else problem
        label, where = setting.labels()[index], self._where(text)
        return Outcome(label, self.milestone, problem=problem, where=where)

    def _where(self, traceback: str) -> str:
        """Return the file and line where it last was, if the file is in the reader's folder."""
        for file, line in re.findall(r'File "(.+)", line (\d+)', traceback):
            if Path(file).parent == self.path.parent:
                says = linecache.getline(file, int(line)).strip()
                return f"{Path(file).name}, line {line}: {says}"
        return ""


def _run(
    pipe: Any,
    milestone: str,
    path: Path,
    setting: Setting,
    index: int,
    traceback: str,
    seconds: float,
) -> None:
    """Send the outcome. After `seconds`, write where the scheduler is, and end. Runs in the
    process."""

    def debug() -> None:
        faulthandler.cancel_dump_traceback_later()  # a debugger has no time limit
        sys.stdin = open("/dev/tty", encoding="utf-8")  # noqa: SIM115
        pdb.Pdb().set_trace(sys._getframe().f_back)

    with open(traceback, "w") as file:
        faulthandler.dump_traceback_later(seconds, exit=True, file=file)
        sys.breakpointhook = debug
        sys.path.insert(0, str(path.parent))
        outcome = Here(milestone, path).run(setting, index)
        faulthandler.cancel_dump_traceback_later()
    pipe.send(outcome)
