"""An engine in a process of its own, so that HTTP's Python and the engine's do not share a lock.

    HTTP's process                                        the engine's process
    EngineProcess  add_requests, abort, ...  -- pipe -->  a thread: EngineLoop.add_requests, ...
                   run: deliver              <-- pipe --  EngineLoop.run, in the main thread

The engine's process is started before anything heavy is loaded: HTTP's never imports torch. Neither
outlives the other.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any

from milestone_llm.core.errors import InputError
from milestone_llm.lab.cli import model_libraries

from .engine_client import (
    EngineDeadError,
    EngineInfo,
    EngineReport,
    EngineRequest,
    RequestDelta,
    StepSink,
)
from .engine_spec import EngineSpec

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from .engine_loop import EngineLoop

CONTEXT: BaseContext = multiprocessing.get_context("spawn")
"""A fresh interpreter: CUDA does not survive a fork."""
STOP_SECONDS = 10.0
"""For how long the step under way may go on when the server has ended; then it is cut off."""


class EngineProcess:
    """An `EngineClient`, and the owner of the process. To be left with `with`."""

    info: EngineInfo
    """There once `wait_until_ready` has returned."""

    def __init__(self, spec: EngineSpec) -> None:
        self._pipe, inner = CONTEXT.Pipe()
        self._process = CONTEXT.Process(  # type: ignore[attr-defined]
            target=run_engine, args=(spec, inner), name="engine"
        )
        with _ctrl_c_ignored():  # the child inherits it; the one to end it is this process
            self._process.start()
        inner.close()
        self.problem: str | None = None
        self._answers: dict[int, Future[list[EngineReport]]] = {}
        self._num_questions = 0
        self._sink: StepSink | None = None
        self._is_stopping = False

    def wait_until_ready(self) -> None:
        """Wait for the model.

        Raises:
            InputError: what was asked for cannot be had; the message is that of the engine.
            EngineDeadError: its process has ended, with a traceback on standard error.
        """
        # So that a tokenizer says no more here than in the engine's process.
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        try:
            kind, content = self._pipe.recv()
        except (EOFError, OSError):
            raise EngineDeadError(f"the engine is dead: its process {self._ending()}") from None
        if kind == "refusal":
            raise InputError(content)
        self.info = content

    # -- for HTTP ----------------------------------------------------------------------------

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests. If the engine refuses one, its delta says so."""
        self._command("add_requests", requests)

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; before the next step it has no memory any more."""
        self._command("abort", request_id)

    def want_more(self) -> None:
        """Send tokens with the next step."""
        self._command("want_more")

    def report(self) -> Future[list[EngineReport]]:
        """The figures as they are between two steps."""
        self._num_questions += 1
        answer = self._answers[self._num_questions] = Future()
        self._command("report", self._num_questions)
        return answer

    def watch(self, sink: StepSink | None) -> None:
        """Give each step's record to `sink`, in the thread of `run`; None: to nobody any more."""
        self._sink = sink
        self._command("watch", sink is not None)

    def stop(self) -> None:
        """Let `run` return after the step under way, or after `STOP_SECONDS`."""
        self._is_stopping = True
        self._command("stop")
        timer = threading.Timer(STOP_SECONDS, self._process.kill)
        timer.daemon = True
        timer.start()

    def _command(self, *command: Any) -> None:
        with contextlib.suppress(OSError):  # the process has ended: `run` will say so
            self._pipe.send(command)

    # -- in the main thread ------------------------------------------------------------------

    def run(self, deliver: Callable[[list[RequestDelta]], None]) -> None:
        """Serve until `stop`.

        Args:
            deliver: called in this thread with what steps have brought.

        Raises:
            EngineDeadError: the engine gave up, or its process has ended.
        """
        while True:
            try:
                kind, *content = self._pipe.recv()
            except (EOFError, OSError):
                break
            if kind == "deltas":
                deliver(*content)
            elif kind == "step":
                if (sink := self._sink) is not None:
                    sink(*content)
            elif kind == "report":
                number, report = content
                answer = self._answers.pop(number)
                if answer.set_running_or_notify_cancel():  # else nobody waits for it any more
                    answer.set_result(report)
            else:
                raise EngineDeadError(*content)
        if not self._is_stopping:
            raise EngineDeadError(f"the engine is dead: its process {self._ending()}")

    def _ending(self) -> str:
        self._end()
        code: int = self._process.exitcode
        if code < 0:
            return f"was ended by {signal.Signals(-code).name}"
        return f"has ended with exit code {code}"

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pipe.close()
        self._end(STOP_SECONDS if error is None else 0.0)

    def _end(self, seconds: float = STOP_SECONDS) -> None:
        """Wait for the process to end, and then no longer."""
        self._process.join(seconds)
        self._process.kill()  # if it is there still
        self._process.join()


# --- in the engine's process ----------------------------------------------------------------------


def run_engine(spec: EngineSpec, pipe: Connection) -> None:
    """What the engine's process does, from its beginning to its end."""
    for number in (signal.SIGINT, signal.SIGTERM):  # HTTP's process says when to end, and how
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with model_libraries(spec.num_threads):
        from .engine_loop import EngineLoop

        try:
            loop = EngineLoop(spec.build())
        except InputError as error:
            _send(pipe, "refusal", str(error))
            return
        _send(pipe, "info", loop.info)
        threading.Thread(target=_receive_commands, args=(loop, pipe), daemon=True).start()
        try:
            loop.run(partial(_send, pipe, "deltas"))
        except EngineDeadError as error:
            _send(pipe, "death", str(error))
            raise SystemExit(1) from None


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _send(pipe: Connection, kind: str, *content: Any) -> None:
    """Tell HTTP's process something. Always in the engine's thread."""
    with contextlib.suppress(OSError):  # it has ended, and this one is about to
        pipe.send((kind, *content))


def _end_with_parent() -> None:
    """End this process at once when HTTP's has ended without a word."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _receive_commands(loop: EngineLoop, pipe: Connection) -> None:
    """Pass commands on, for as long as they come."""

    def send_report(number: int, answer: Future[list[EngineReport]]) -> None:
        _send(pipe, "report", number, answer.result())

    with contextlib.suppress(EOFError, OSError):
        while True:
            kind, *content = pipe.recv()
            if kind == "report":
                loop.report().add_done_callback(partial(send_report, *content))
            elif kind == "watch":
                loop.watch(partial(_send, pipe, "step") if content[0] else None)
            else:  # of the same name: add_requests, abort, want_more, stop
                getattr(loop, kind)(*content)
    loop.stop()
