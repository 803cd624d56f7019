"""The debugger of a walkthrough: a pdb whose breakpoints are functions with conditions.

pdb's own breakpoints are lines of files, which are wrong after every edit. Here, the interpreter's
call and return events are compared with the code object of the next `Stop`.
"""

from __future__ import annotations

import pdb
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

from .guide import Stop


class GuidedPdb(pdb.Pdb):
    """A pdb whose breakpoints are `Stop`s, and whose `continue` goes to the next one.

    Frames without a stop run without line tracing, unless the user steps into them.

    Args:
        stops: in the order in which they are reached; each is armed when the one before has passed.
        arrived: called with the names of the frame at each stop.
        is_auto: do not show a prompt.
        first: number of the first stop that is shown; those before it are passed silently.
    """

    def __init__(
        self,
        stops: Sequence[Stop],
        arrived: Callable[[Stop, dict[str, Any]], None],
        is_auto: bool,
        first: int = 1,
    ) -> None:
        # never stop in the code that starts the scenario
        super().__init__(nosigint=True, skip=[__name__])
        self._stops = stops
        self._arrived = arrived
        self._is_auto = is_auto
        self._first = first
        # By id, since hashing a code object is slow.
        self._watched = {id(stop.function.__code__) for stop in stops}
        self._hits: Counter[tuple[int, str]] = Counter()
        self._condition_error = ""
        self.num_passed = 0
        self.broken_hints: list[str] = []
        """Hints of passed stops that do not work. They are checked only where there is no
        prompt."""

    def follow(self, scenario: Callable[[], Any]) -> None:
        """Run the scenario and stop where the guide says. Another tracer is restored afterwards."""
        before = sys.gettrace()
        self.reset()
        self.botframe = sys._getframe()
        self.set_continue()
        sys.settrace(self.trace_dispatch)
        try:
            scenario()
        except Exception:
            if not self.quitting:  # else the user has quit, and the error is a result of that
                raise
        finally:
            sys.settrace(before)

    def unreached(self) -> list[str]:
        """Return why the armed stop was not reached; empty if all were."""
        if self.num_passed == len(self._stops):
            return []
        stop = self._stops[self.num_passed]
        hits = self._hits[id(stop.function.__code__), stop.event]
        why = f"{stop.location} had {hits} {stop.event}s"
        if hits and stop.when:
            why += f", after the stop before never one when {stop.when}"
        if self._condition_error:
            why += f" (which raised {self._condition_error})"
        num_behind = len(self._stops) - self.num_passed - 1
        behind = f"; nor the {num_behind} after it" if num_behind else ""
        return [f"stop {self.num_passed + 1} ({stop.title}) was never reached: {why}{behind}"]

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Pass on an event that a stop or the user asks for. Runs at every function call."""
        if id(frame.f_code) not in self._watched:
            if event == "call" and self.stoplineno == -1 and not self.breaks:
                return None  # no line tracing
            return super().trace_dispatch(frame, event, arg)
        if event in ("call", "return"):
            self._watch(frame, event, arg)
        super().trace_dispatch(frame, event, arg)
        return self.trace_dispatch  # for its return event

    def _watch(self, frame: FrameType, event: str, arg: Any) -> None:
        """Count the hit. If the armed stop waits for it, make pdb stop here."""
        key = id(frame.f_code), event
        self._hits[key] += 1
        armed = self._stops[self.num_passed : self.num_passed + 1]
        if not armed or (id(armed[0].function.__code__), armed[0].event) != key:
            return
        stop = armed[0]
        names = {**frame.f_globals, **frame.f_locals, "__return__": arg, "hits": self._hits[key]}
        try:
            if stop.when and not eval(stop.when, names):
                return
        except Exception as error:
            self._condition_error = f"{type(error).__name__}: {error}"
            return
        self._condition_error = ""
        self.num_passed += 1
        if self.num_passed < self._first:
            return
        self._arrived(stop, names)
        if self._is_auto:
            self.broken_hints += broken_hints(stop, frame, names)
            return
        self.message("")
        self.set_step()
        caller: FrameType | None = frame
        # callers ran untraced; now one can step to them
        while caller and caller is not self.botframe:
            caller.f_trace = self.trace_dispatch
            caller = caller.f_back

    def set_continue(self) -> None:
        """Run to the next stop: tracing goes on without a breakpoint, too."""
        self._set_stopinfo(self.botframe, None, -1)  # type: ignore[attr-defined]

    def _getval(self, arg: str) -> Any:
        """Evaluate for `p` and `pp` as a card does: comprehensions can use the frame's locals."""
        assert self.curframe is not None
        is_old = sys.version_info < (3, 13)  # its copy has the user's assignments
        names = self.curframe_locals if is_old else self.curframe.f_locals
        try:
            return eval(arg, {**self.curframe.f_globals, **names})
        except Exception:
            return super()._getval(arg)  # reports the error


def broken_hints(stop: Stop, frame: FrameType, names: Mapping[str, Any]) -> list[str]:
    """Return the commands in a hint that print something and fail. `u` moves on to the caller."""
    broken = []
    for command in re.findall("`(.+?)`", stop.hint):
        name, _, expression = command.partition(" ")
        if command == "u" and frame.f_back is not None:
            frame = frame.f_back
            names = {**frame.f_globals, **frame.f_locals}
        elif name in ("p", "pp"):
            try:
                repr(eval(expression, dict(names)))
            except Exception as error:
                broken.append(f"{stop.title}: `{command}` raises {type(error).__name__}: {error}")
    return broken
