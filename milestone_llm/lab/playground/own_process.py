"""A version of the reader's scheduler in a process of its own.

It may loop, exit or crash while it is loaded and while it runs: what it does to itself it does to
nobody else.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import linecache
import multiprocessing
import os
import pdb
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .own import Here
from .setting import Setting
from .simulate import Outcome

SECONDS = 5.0
"""For a run, and for loading."""
AT_ONCE = 0.2
"""Seconds before the end at which a process writes down where it is."""
DEBUGGER = "the debugger is in use"


class InAProcess:
    """A version in a process of its own, begun at once, and again when it has been ended."""

    def __init__(self, milestone: str, path: Path) -> None:
        self.milestone, self.path = milestone, path
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._place = Path(tempfile.mkstemp(prefix="place_")[1])
        spawning = multiprocessing.get_context("spawn")
        self._pipe, theirs = spawning.Pipe()
        arguments = (theirs, self.milestone, self.path, self._place, SECONDS - AT_ONCE)
        self._process = spawning.Process(target=_serve, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        self._is_loaded = False

    def run(self, setting: Setting, index: int) -> Outcome:
        """A side of a setting, with this scheduler; what is wrong with it is the outcome's."""
        with self._lock:
            if not self._process.is_alive():
                self._begin()
            try:
                if not self._is_loaded:
                    self._answer(10 * SECONDS)  # of a process that has to import all of this
                    self._answer(SECONDS)
                    self._is_loaded = True
                self._pipe.send((setting, index))
                outcome: Outcome = self._answer(SECONDS)
                return outcome
            except TimeoutError as error:
                problem = str(error)
            except (EOFError, OSError):
                self._process.join()
                problem = f"its process has ended with status {self._process.exitcode}"
            where = self._where()
            self.end()
            return Outcome(setting.labels()[index], self.milestone, problem=problem, where=where)

    def _answer(self, seconds: float) -> Any:
        """What the process says next. While its debugger is in use it has all the time it wants.

        Raises:
            TimeoutError: it says nothing for so long.
            EOFError: it has ended.
        """
        limit: float | None = seconds
        while True:
            if not self._pipe.poll(limit):
                raise TimeoutError(f"stopped after {seconds:.0f} s")
            answer = self._pipe.recv()
            if answer != DEBUGGER:
                return answer
            limit = None

    def _where(self) -> str:
        """File and line at which it was last, if that is one of the folder."""
        text = self._place.read_text(encoding="utf-8", errors="replace")
        for file, line in re.findall(r'File "(.+)", line (\d+)', text):
            if Path(file).parent == self.path.parent:
                linecache.checkcache(file)
                says = linecache.getline(file, int(line)).strip()
                return f"{Path(file).name}, line {line}: {says}"
        return ""

    def end(self) -> None:
        """End the process; the next run begins another."""
        self._process.kill()
        self._process.join()
        self._pipe.close()
        self._place.unlink(missing_ok=True)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # amid the interpreter's end
            self.end()


def _serve(pipe: Any, milestone: str, path: Path, place: Path, seconds: float) -> None:
    """The process: it says that it has begun, that the file is loaded, then each run's outcome.

    seconds: after which it writes to `place` where it is.
    """
    with contextlib.suppress(OSError), place.open("w") as file, contextlib.suppress(EOFError):
        if os.path.exists("/dev/tty"):
            with contextlib.suppress(OSError):
                sys.stdin = io.TextIOWrapper(open("/dev/tty", "rb", buffering=0))  # noqa: SIM115

        def debug() -> None:
            pipe.send(DEBUGGER)
            faulthandler.cancel_dump_traceback_later()
            pdb.Pdb().set_trace(sys._getframe().f_back)

        def limited(work: Callable[[], Any]) -> Any:
            faulthandler.dump_traceback_later(seconds, file=file)
            try:
                return work()
            finally:
                faulthandler.cancel_dump_traceback_later()

        sys.breakpointhook = debug
        pipe.send("begun")
        version = limited(lambda: Here(milestone, path))
        pipe.send("loaded")
        while True:
            setting, index = pipe.recv()
            pipe.send(limited(lambda: version.run(setting, index)))  # noqa: B023
