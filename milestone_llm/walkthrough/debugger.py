"""The debugger of a walkthrough: a pdb whose breakpoints are functions with conditions.

pdb's own breakpoints are lines of files and go stale with every edit; here the interpreter's call
and return events are compared with the code object of the `Stop` that is waited for.
"""

from __future__ import annotations

import dis
import pdb
import sys
from collections import Counter
from collections.abc import Sequence
from types import CodeType, FrameType
from typing import Any

from .card import CardPrinter, Stop


class WalkthroughDebugger(pdb.Pdb):
    """A pdb whose breakpoints are `Stop`s, and whose `continue` goes to the next one.

    Frames that no stop asks for run without line tracing, unless the user steps into them.
    """

    def __init__(self, stops: Sequence[Stop], out: CardPrinter, is_auto: bool) -> None:
        # Python 3.14 offers another way to trace, which never calls `trace_dispatch` for a
        # function that has no breakpoint.
        backend: dict[str, Any] = {"backend": "settrace"} if sys.version_info >= (3, 14) else {}
        super().__init__(nosigint=True, **backend)
        self._stops = stops
        self._out = out
        self._is_auto = is_auto
        # By id, since hashing a code object is slow.
        self._entry_offsets = {id(stop.code): _entry_offset(stop.code) for stop in stops}
        self._hits: Counter[tuple[int, str]] = Counter()
        self._arrived: Stop | None = None
        self._condition_error = ""
        self.num_passed = 0
        self.num_expected = 0
        self.was_quit = False
        self.failures: list[str] = []

    @property
    def armed(self) -> Stop | None:
        """The stop that is waited for."""
        return self._stops[self.num_passed] if self.num_passed < len(self._stops) else None

    def unreached(self) -> list[str]:
        """Why the armed stop was not reached; empty once all have been."""
        stop = self.armed
        if stop is None:
            return []
        hits = self._hits[id(stop.code), stop.at]
        why = f"{stop.place} had {hits} {stop.at}s" if hits else f"no {stop.at} of {stop.place}"
        if hits and stop.when:
            why += f", after the stop before never one when {stop.when}"
        if self._condition_error:
            why += f" (which raised {self._condition_error})"
        num_behind = len(self._stops) - self.num_passed - 1
        behind = f"; nor the {num_behind} after it" if num_behind else ""
        return [f"stop {self.num_passed + 1} ({stop.title}) was never reached: {why}{behind}"]

    # What the interpreter reports

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Pass on what a stop or the user asks for; this runs at every call there is."""
        if event == "call" and id(frame.f_code) not in self._entry_offsets:
            is_running_freely = self.stoplineno == -1 and not self.breaks
            if is_running_freely and not self.quitting:
                return None
        return super().trace_dispatch(frame, event, arg)

    def dispatch_call(self, frame: FrameType, arg: Any) -> Any:
        """Stop at the call if the armed stop says so, else do what pdb does."""
        if self.botframe is None:  # the scenario itself: run it up to the first stop
            self.botframe = frame.f_back
            self.set_continue()
        entry_offset = self._entry_offsets.get(id(frame.f_code))
        if entry_offset is None:
            return super().dispatch_call(frame, arg)
        if frame.f_lasti <= entry_offset:  # else: a generator that goes on after a yield
            self._arrive(frame, "call")
        super().dispatch_call(frame, arg)
        return self.trace_dispatch  # for its return

    def dispatch_return(self, frame: FrameType, arg: Any) -> Any:
        """Stop at the return if the armed stop says so, else do what pdb does."""
        if id(frame.f_code) in self._entry_offsets:
            frame.f_locals["__return__"] = arg
            self._arrive(frame, "return")
        return super().dispatch_return(frame, arg)

    def _arrive(self, frame: FrameType, at: str) -> None:
        """Count the hit and, if the armed stop waits for it, make pdb stop right here."""
        self._hits[id(frame.f_code), at] += 1
        stop = self.armed
        if stop is None or stop.code is not frame.f_code or stop.at != at:
            return
        if stop.when:
            hits = self._hits[id(frame.f_code), at]
            try:
                if not eval(stop.when, {**_namespace(frame), "hits": hits}):
                    return
            except Exception as error:
                self._condition_error = f"{type(error).__name__}: {error}"
                return
        self._arrived = stop
        self._condition_error = ""
        self.set_step()

    def user_call(self, frame: FrameType, argument_list: Any) -> None:
        """pdb is about to stop at a call: with a card if a stop asked for it."""
        if not self._show(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """pdb is about to stop at a return: with a card if a stop asked for it."""
        if not self._show(frame):
            super().user_return(frame, return_value)

    def _show(self, frame: FrameType) -> bool:
        stop, self._arrived = self._arrived, None
        if stop is None:
            return False
        self.num_passed += 1
        namespace = _namespace(frame)
        seen = [look.evaluate(namespace) for look in stop.look]
        self._out.card(stop, self.num_passed, len(self._stops), seen)
        self.num_expected += sum(look.has_expectation for look in stop.look)
        self.failures += [
            f"stop {self.num_passed} ({stop.title}): {each.look.expression} is {each.shown}, "
            f"expected {each.expected}"
            for each in seen
            if not each.is_right
        ]
        if self._is_auto:
            self.set_continue()
        else:
            self._trace_callers(frame)
            self._out.line()
            self.interaction(frame, None)
        return True

    def _trace_callers(self, frame: FrameType) -> None:
        """Let the user step out into the callers, which ran untraced so far."""
        caller = frame.f_back
        while caller is not None and caller is not self.botframe:
            caller.f_trace = self.trace_dispatch
            caller = caller.f_back

    # What pdb does differently here

    def stop_here(self, frame: FrameType) -> bool:
        """Whether to stop in this frame; never in what started the scenario."""
        return frame is not self.botframe and super().stop_here(frame)

    def set_continue(self) -> None:
        """Run to the next stop: tracing stays on even without a breakpoint."""
        self._set_stopinfo(self.botframe, None, -1)  # type: ignore[attr-defined]

    def set_quit(self) -> None:
        """Leave the scenario (`q`, or the end of the input)."""
        self.was_quit = True
        super().set_quit()

    def _getval(self, arg: str) -> Any:
        """Evaluate for `p` and `pp` as a card does: comprehensions see the frame's locals too."""
        assert self.curframe is not None
        if sys.version_info >= (3, 13):
            names = self.curframe.f_locals
        else:  # the copy that holds what the user has assigned
            names = self.curframe_locals
        try:
            return eval(arg, {**self.curframe.f_globals, **names})
        except Exception:
            return super()._getval(arg)  # reports the error


def _namespace(frame: FrameType) -> dict[str, Any]:
    """Globals and locals as one, so that a comprehension finds both."""
    return {**frame.f_globals, **frame.f_locals}


def _entry_offset(code: CodeType) -> int:
    """`f_lasti` when the body starts, rather than goes on after a yield; -1 before Python 3.11."""
    return next((i.offset for i in dis.get_instructions(code) if i.opname == "RESUME"), -1)
