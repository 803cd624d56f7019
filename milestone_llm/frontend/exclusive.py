"""One thread at a time changes the engine, and an interrupted change begins anew."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class Exclusive:
    """Runs changes one after the other, whichever threads they come from.

    Args:
        restart: called after anything was raised in a change, Ctrl-C included. It repairs a change
            that was left half done.
    """

    def __init__(self, restart: Callable[[], object] = lambda: None) -> None:
        self._restart = restart
        self._lock = threading.RLock()
        self._is_torn = False  # True during a change, and after an interruption until the restart

    def run(self, change: Callable[[], Result]) -> Result:
        """Run a change; other threads wait.

        Raises:
            RuntimeError: called from within a change, by something that watches the steps, say.
        """
        if self.is_inside():
            raise RuntimeError("the engine was called from within one of its own steps")
        try:
            with self._lock:
                if self._is_torn:  # a change was interrupted, and so was its restart
                    self._restart()
                self._is_torn = True
                try:
                    result = change()
                except BaseException as error:
                    try:
                        self._restart()
                    except Exception as second:  # of what the first one left, most likely
                        raise error from second
                    self._is_torn = False
                    raise
                self._is_torn = False
                return result
        finally:
            # Ctrl-C in the very moment in which `with` ends would leave the lock held.
            with contextlib.suppress(RuntimeError):
                self._lock.release()

    def is_inside(self) -> bool:
        """Whether this thread is within a change already: read off its stack."""
        frame = sys._getframe(1).f_back
        while frame is not None:
            if frame.f_code is Exclusive.run.__code__ and frame.f_locals["self"] is self:
                return True
            frame = frame.f_back
        return False
