"""An engine in a process of its own, so that HTTP's Python and the engine's do not share a lock.

    HTTP's process                                           the engine's process
    EngineProcess
      add_requests, abort, ...  -- a queue of orders -->     a thread: the same call of EngineLoop
      run: deliver              <-- pipe --                  EngineLoop.run, in the main thread
      problem                   <-- a number --              a thread: when it last lived

Whoever gives an order does not wait for an engine that stands still: multiprocessing's queue sends
in a thread of its own. HTTP's process starts that of the engine, before anything heavy is loaded:
it never imports torch. The engine's does not outlive it.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any

from milestone_llm.command.cli import model_libraries
from milestone_llm.core.errors import InputError
from milestone_llm.frontend.garbage import freeze_garbage, nothing_collected

from .client import Deliver, EngineDeadError, EngineInfo, EngineReport, EngineRequest, StepSink

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext
    from multiprocessing.queues import Queue

    from milestone_llm.frontend.engine import BaseEngine

    from .loop import EngineLoop

CONTEXT: SpawnContext = multiprocessing.get_context("spawn")
"""A fresh interpreter: CUDA does not survive a fork."""
STOP_SECONDS = 10.0
"""For how long the engine's process may go on when it has to end; then it is cut off."""
BEAT_SECONDS = 1.0
"""How often it looks whether HTTP's is still there."""
SILENCE_SECONDS = 10.0
"""After so long without a sign of life, `/health` says that the engine stands still."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine that has not been built yet. Can be pickled."""

    milestone: str
    """The package whose `LLMEngine` it is."""
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Of its EngineConfig."""
    num_threads: int | None = None
    """CPU threads; None leaves them to torch."""
    prepare: Callable[[BaseEngine], object] | None = None
    """Called with the engine once it is built, in its process."""

    def build(self) -> BaseEngine:
        """The engine, with everything done that a first request would have to wait for.

        Raises:
            InputError: there is no such model, or the fields do not go together.
        """
        from milestone_llm.trace.tracer import Tracer

        with nothing_collected():
            engine: BaseEngine = importlib.import_module(self.milestone).LLMEngine(
                self.model, **self.fields
            )
            if self.prepare is not None:
                self.prepare(engine)
            engine.warm_up()
        if isinstance(engine.tracer, Tracer):
            engine.tracer.keeps_records = False  # a server runs for long
        freeze_garbage()
        return engine


class EngineProcess:
    """The engine's process, for HTTP: an `EngineClient`. To be left with `with`."""

    info: EngineInfo
    """There once `wait_until_ready` has returned."""

    def __init__(self, spec: EngineSpec) -> None:
        self._orders: Queue[tuple[str, Any] | None] = CONTEXT.Queue()
        """What `EngineLoop` is to do, and with what. None: nothing more."""
        self._orders.cancel_join_thread()  # at the end, what the engine has not read is dropped
        self._sink: StepSink | None = None
        self._askers: list[Future[list[EngineReport]]] = []
        self._asking = threading.Lock()
        self._is_stopping = threading.Event()
        self._last_beat = CONTEXT.RawValue("d", time.monotonic())
        """When the process has last said that it lives."""
        self._pipe, inner = CONTEXT.Pipe()
        self._process = CONTEXT.Process(
            target=run_engine, args=(spec, self._orders, inner, self._last_beat)
        )
        with ctrl_c_ignored():  # the child inherits it; the one to end it is this process
            self._process.start()
        inner.close()

    def wait_until_ready(self) -> None:
        """Wait for the model.

        Raises:
            InputError: what was asked for cannot be had; the message is that of the engine.
            EngineDeadError: its process has ended, with a traceback on standard error.
        """
        try:
            kind, content = self._pipe.recv()
        except (EOFError, OSError):
            raise self._death() from None
        if kind == "refusal":
            raise InputError(content)
        self.info = content

    # -- for HTTP ----------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """That the engine's process gives no sign of life. It may be stopped, or swapped out."""
        silence = time.monotonic() - self._last_beat.value
        if silence < SILENCE_SECONDS:
            return None
        return f"the engine has given no sign of life for {silence:.0f} s"

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests. If the engine refuses one, it says so."""
        self._orders.put(("add", requests))

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; before the next step it has no memory any more."""
        self._orders.put(("abort", request_id))

    def end_completion(self, completion_id: str) -> None:
        """A stop string has ended a completion; others of its request go on."""
        self._orders.put(("end", completion_id))

    def report(self) -> Future[list[EngineReport]]:
        """The figures as they are between two steps."""
        answer = Future[list[EngineReport]]()
        with self._asking:  # whoever has given up is forgotten
            self._askers = [each for each in self._askers if not each.done()] + [answer]
        self._orders.put(("report", None))
        return answer

    def watch(self, sink: StepSink | None) -> None:
        """Give each step's record to `sink`, in the thread of `run`; None: no more."""
        self._sink = sink
        self._orders.put(("watch", sink is not None))

    def stop(self) -> None:
        """Hang up: `run` returns, and the engine's process ends after the step under way."""
        self._is_stopping.set()
        self._orders.put(None)
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    # -- in the main thread ------------------------------------------------------------------

    def run(self, deliver: Deliver) -> None:
        """Serve until `stop`, or until the engine's process has ended.

        Raises:
            EngineDeadError: the engine gave up, or its process has ended.
        """
        while True:
            try:
                kind, content = self._pipe.recv()
            except (EOFError, OSError):
                break
            if kind == "tokens":
                deliver(content)
            elif kind == "report":
                self._take_report(content)
            elif kind == "step":
                if (sink := self._sink) is not None:
                    sink(content)
            else:
                raise EngineDeadError(content)
        if not self._is_stopping.is_set():
            raise self._death()

    def _take_report(self, reports: list[EngineReport]) -> None:
        with self._asking:
            askers, self._askers = self._askers, []
        for answer in askers:
            if answer.set_running_or_notify_cancel():  # else it was given up
                answer.set_result(reports)

    def _death(self) -> EngineDeadError:
        self._end(STOP_SECONDS)
        code = self._process.exitcode or 0
        ending = f"has ended with exit code {code}"
        if code < 0:
            ending = f"was ended by {signal.Signals(-code).name}"
        return EngineDeadError(f"the engine is dead: its process {ending}")

    def _end(self, seconds: float) -> None:
        """Wait so long for the process to end, and then no longer."""
        self._process.join(seconds)
        self._process.kill()  # if it is there still
        self._process.join()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        self._end(STOP_SECONDS if error is None else 0.0)
        self._pipe.close()


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Ctrl-C does nothing while the block runs, nor in processes that are started there."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- in the engine's process ----------------------------------------------------------------------


def run_engine(
    spec: EngineSpec, orders: Queue[tuple[str, Any] | None], pipe: Connection, last_beat: Any
) -> None:
    """What the engine's process does, from its beginning to its end.

    Args:
        last_beat: where it says that it lives.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # HTTP's process says when to end, and how
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_live, args=(last_beat,), daemon=True).start()
    with model_libraries(spec.num_threads):
        from .loop import EngineLoop

        try:
            loop = EngineLoop(spec.build())
        except InputError as error:
            with contextlib.suppress(OSError):  # HTTP's process has ended
                pipe.send(("refusal", str(error)))
        else:
            _run_loop(loop, orders, pipe)


def _live(last_beat: Any) -> None:
    """Say that this process lives. When HTTP's has ended without a word, so does this, at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive():
        last_beat.value = time.monotonic()
        parent.join(BEAT_SECONDS)
    os._exit(1)


def _run_loop(loop: EngineLoop, orders: Queue[tuple[str, Any] | None], pipe: Connection) -> None:
    def send(kind: str, content: Any) -> None:
        """Tell HTTP's process something. Called in the engine's thread alone."""
        with contextlib.suppress(OSError):  # it has ended
            pipe.send((kind, content))

    def obey() -> None:
        """Pass orders on until the last one; then the engine ends."""
        try:
            while (order := orders.get()) is not None:
                _pass_on(loop, *order, send)
        finally:
            loop.stop()

    send("info", loop.info)
    threading.Thread(target=obey, daemon=True).start()
    try:
        loop.run(partial(send, "tokens"))
    except EngineDeadError as error:
        send("death", str(error))
        raise SystemExit(1) from None


def _pass_on(loop: EngineLoop, order: str, content: Any, send: Callable[[str, Any], None]) -> None:
    """Call what `EngineProcess` was called. What the loop says, its own thread sends."""
    if order == "add":
        loop.prepare(content)
        loop.add_requests(content)
    elif order == "abort":
        loop.abort(content)
    elif order == "end":
        loop.end_completion(content)
    elif order == "report":
        loop.report().add_done_callback(lambda answer: send("report", answer.result()))
    else:
        loop.watch(partial(send, "step") if content else None)
