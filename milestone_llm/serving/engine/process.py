"""An engine in a process of its own, so that HTTP's Python and the engine's do not share a lock.

    HTTP's process                                           the engine's process
    EngineProcess
      add_requests, abort, ...  -- a queue of orders -->     a thread: the same call of EngineLoop
      run: deliver              <-- pipe --                  EngineLoop.run, in the main thread
      problem                   <-- a number --              a thread: time of its last heartbeat

To give an order never waits for a busy engine: multiprocessing's queue sends in a thread of its
own. HTTP's process starts the engine's before anything heavy is loaded, and never imports torch.
The engine's process ends when HTTP's does.
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
from queue import SimpleQueue
from types import TracebackType
from typing import TYPE_CHECKING, Any

from milestone_llm.cli import model_libraries
from milestone_llm.core.errors import InputError
from milestone_llm.gc_control import freeze_gc_heap, gc_paused

from .client import Deliver, EngineDeadError, EngineInfo, EngineReport, EngineRequest, StepSink

if TYPE_CHECKING:
    from multiprocessing.context import SpawnContext
    from multiprocessing.queues import Queue

    from milestone_llm.core.engine_core import ModelRunner
    from milestone_llm.frontend.engine import BaseEngine

    from .loop import EngineLoop

CONTEXT: SpawnContext = multiprocessing.get_context("spawn")
"""Starts a fresh interpreter: CUDA does not survive a fork."""
STOP_SECONDS = 10.0
"""Seconds that the engine's process may take to end; then it is killed."""
BEAT_SECONDS = 1.0
"""Seconds between two heartbeats, and between two checks that HTTP's process still runs."""
SILENCE_SECONDS = 10.0
"""Seconds without a heartbeat after which `/health` says that the engine does not respond."""


@dataclass(frozen=True)
class EngineSpec:
    """An engine that has not been built yet. It can be pickled."""

    milestone: str
    """The package of its `LLMEngine`."""
    model: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of its `EngineConfig`."""
    num_threads: int | None = None
    """Number of CPU threads; None: torch's default."""
    runner: ModelRunner | None = None
    """Computes the steps in place of the milestone's own."""

    def build(self) -> BaseEngine:
        """Build the engine, and do everything that the first request would have to wait for.

        Raises:
            InputError: there is no such model, or the fields contradict each other.
        """
        from milestone_llm.trace.tracer import Tracer

        with gc_paused():
            engine: BaseEngine = importlib.import_module(self.milestone).LLMEngine(
                self.model, runner=self.runner, **self.fields
            )
            engine.warm_up()
            engine.input_processor.grammars.warm_up()
        if isinstance(tracer := engine.tracer, Tracer):  # a server runs too long to keep records
            engine.step_log.unwatch(tracer)
            engine.step_log.watch(Tracer(tracer.sinks, keeps_records=False))
        freeze_gc_heap()
        return engine


class EngineProcess:
    """The engine's process, as an `EngineClient` for HTTP. Use it in a `with` block."""

    info: EngineInfo
    """Set when `wait_until_ready` has returned."""

    def __init__(self, spec: EngineSpec) -> None:
        self._orders: Queue[tuple[str, Any] | None] = CONTEXT.Queue()
        """Methods that `EngineLoop` shall call, with their arguments. None: no more will come."""
        self._orders.cancel_join_thread()  # at the end, unread orders are dropped
        self._sink: StepSink | None = None
        self._askers: list[Future[list[EngineReport]]] = []
        self._resetters = SimpleQueue[Future[list[bool | None]]]()
        """Who has asked for a reset of the prefix cache; the answers come in this order."""
        self._asking = threading.Lock()
        self._is_stopping = threading.Event()
        self._last_beat = CONTEXT.RawValue("d", time.monotonic())
        """Time of the process's last heartbeat."""
        self._pipe, inner = CONTEXT.Pipe()
        self._process = CONTEXT.Process(
            target=run_engine, args=(spec, self._orders, inner, self._last_beat)
        )
        with ctrl_c_ignored():  # the child inherits this; only this process ends it
            self._process.start()
        inner.close()

    def wait_until_ready(self) -> None:
        """Wait until the engine is built.

        Raises:
            InputError: the engine could not be built as requested; the message is the engine's.
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
        """That the engine's process has sent no heartbeat: it may be stopped, or swapped out."""
        silence = time.monotonic() - self._last_beat.value
        if silence < SILENCE_SECONDS:
            return None
        return f"the engine has given no sign of life for {silence:.0f} s"

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests. If the engine rejects one, a message says so."""
        self._orders.put(("add", requests))

    def abort(self, request_id: str) -> None:
        """End a request in any state. Its memory is free before the next step."""
        self._orders.put(("abort", request_id))

    def end_completion(self, completion_id: str) -> None:
        """End a completion after a stop string; others of its request go on."""
        self._orders.put(("end", completion_id))

    def report(self) -> Future[list[EngineReport]]:
        """Ask for a report, which is made between two steps."""
        answer = Future[list[EngineReport]]()
        with self._asking:  # forget those that have given up
            self._askers = [each for each in self._askers if not each.done()] + [answer]
        self._orders.put(("report", None))
        return answer

    def reset_prefix_cache(self) -> Future[list[bool | None]]:
        """Forget all cached KV, between two steps. None: this engine has no prefix cache."""
        answer = Future[list[bool | None]]()
        with self._asking:
            self._resetters.put(answer)
            self._orders.put(("reset", None))
        return answer

    def watch(self, sink: StepSink | None) -> None:
        """Send each step's record to `sink`, in the thread of `run`; None ends that."""
        self._sink = sink
        self._orders.put(("watch", sink is not None))

    def stop(self) -> None:
        """Close the pipe: `run` returns, and the engine's process ends after the current step."""
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
            elif kind == "reset":
                if (answer := self._resetters.get()).set_running_or_notify_cancel():
                    answer.set_result(content)
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
            if answer.set_running_or_notify_cancel():  # False: the caller has given up
                answer.set_result(reports)

    def _death(self) -> EngineDeadError:
        self._end(STOP_SECONDS)
        code = self._process.exitcode or 0
        ending = f"has ended with exit code {code}"
        if code < 0:
            ending = f"was ended by {signal.Signals(-code).name}"
        return EngineDeadError(f"the engine is dead: its process {ending}")

    def _end(self, seconds: float) -> None:
        """Wait at most `seconds` for the process to end, then kill it."""
        self._process.join(seconds)
        self._process.kill()  # if it still runs
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
    """Ignore Ctrl-C while the block runs, also in processes that are started in it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


# --- in the engine's process ----------------------------------------------------------------------


def run_engine(
    spec: EngineSpec, orders: Queue[tuple[str, Any] | None], pipe: Connection, last_beat: Any
) -> None:
    """Run the engine's process, from its beginning to its end.

    Args:
        last_beat: where it writes the time of its heartbeats.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # HTTP's process says when and how to end
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
    """Send heartbeats. If HTTP's process ends without sending None, end this one at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive():
        last_beat.value = time.monotonic()
        parent.join(BEAT_SECONDS)
    os._exit(1)


def _run_loop(loop: EngineLoop, orders: Queue[tuple[str, Any] | None], pipe: Connection) -> None:
    def send(kind: str, content: Any) -> None:
        """Send a message to HTTP's process. Called in the engine's thread only."""
        with contextlib.suppress(OSError):  # HTTP's process has ended
            pipe.send((kind, content))

    def obey() -> None:
        """Pass orders on to the loop until None comes; then stop the loop."""
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
    """Call the method that was called on `EngineProcess`. The loop's thread sends its answers."""
    if order == "add":
        loop.add_requests(content)
    elif order == "abort":
        loop.abort(content)
    elif order == "end":
        loop.end_completion(content)
    elif order == "report":
        loop.report().add_done_callback(lambda answer: send("report", answer.result()))
    elif order == "reset":
        loop.reset_prefix_cache().add_done_callback(lambda answer: send("reset", answer.result()))
    else:
        loop.watch(partial(send, "step") if content else None)
