"""An engine in a process of its own, so that HTTP's Python and the engine's do not share a lock.

    HTTP's process                                           the engine's process
    EngineProcess     add_requests, abort, ...
                     -> orders -> a thread   -- pipe -->     a thread: EngineLoop.put
                   run: deliver              <-- pipe --     EngineLoop.run, in the main thread
                   problem                   <- a number --  a thread: when it last lived

One thread writes in each direction, so that messages come whole; and it is not HTTP's, which must
not wait for an engine that stands still. HTTP's process starts that of the engine, before anything
heavy is loaded: it never imports torch. The engine's does not outlive it.
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
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import TracebackType
from typing import TYPE_CHECKING, Any

from milestone_llm.command.cli import model_libraries
from milestone_llm.core.errors import InputError
from milestone_llm.frontend.garbage import freeze_garbage, nothing_collected
from milestone_llm.trace.tracer import Tracer

from .client import Deliver, EngineDeadError, EngineInfo
from .orders import OrderingClient, Orders

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from milestone_llm.frontend.engine import BaseEngine

    from .loop import EngineLoop

CONTEXT: BaseContext = multiprocessing.get_context("spawn")
"""A fresh interpreter: CUDA does not survive a fork."""
STOP_SECONDS = 10.0
"""For how long a process may go on when it has to end; then it is cut off."""
BEAT_SECONDS = 1.0
"""How often a process looks whether the first one is still there."""
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


class EngineProcess(OrderingClient):
    """The engine's process, for HTTP: an `EngineClient`. To be left with `with`."""

    info: EngineInfo
    """There once `wait_until_ready` has returned."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._pipe, inner = CONTEXT.Pipe()
        self._last_beat = CONTEXT.RawValue("d", time.monotonic())
        """When the process has last said that it lives."""
        self._writer = threading.Thread(target=self._send_orders, name="orders", daemon=True)
        self._writer.start()
        self._is_stopping = threading.Event()
        self._process = started_process("engine", run_engine, spec, inner, self._last_beat)
        inner.close()

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
            raise self._death() from None
        if kind == "refusal":
            raise InputError(content)
        self.info = content

    def _death(self) -> EngineDeadError:
        ending = ending_of(self._process)
        return EngineDeadError(f"the engine is dead: its process {ending}")

    # -- for HTTP ----------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """That the engine's process gives no sign of life. It may be stopped, or swapped out."""
        silence = time.monotonic() - self._last_beat.value
        if silence < SILENCE_SECONDS:
            return None
        return f"the engine has given no sign of life for {silence:.0f} s"

    def stop(self) -> None:
        """Hang up: `run` returns, and the engine's process ends after the step under way."""
        self._is_stopping.set()
        super().stop()
        self._hang_up()

    # -- in a thread of its own --------------------------------------------------------------

    def _send_orders(self) -> None:
        """Send what is ordered, until the last order. Waits where the engine does not read."""
        try:
            with contextlib.suppress(OSError):  # the process has ended: `run` will say so
                while not (orders := self.orders.take()).is_last:
                    self._pipe.send(orders)
        finally:
            self._hang_up()  # else nobody would be served any more, and nobody told

    def _hang_up(self) -> None:
        """End the connection for those that read and write at both of its ends."""
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
                self.take_report(content)
            elif kind == "step":
                self.take_step(content)
            else:
                raise EngineDeadError(content)
        if not self._is_stopping.is_set():
            raise self._death()

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        end_process(self._process, None if error is None else 0.0)
        self._writer.join(STOP_SECONDS)
        self._pipe.close()


# --- in the engine's process ----------------------------------------------------------------------


def run_engine(spec: EngineSpec, pipe: Connection, last_beat: Any) -> None:
    """What the engine's process does, from its beginning to its end.

    Args:
        last_beat: where it says that it lives.
    """

    def beat() -> None:
        last_beat.value = time.monotonic()

    follow_first_process(beat)
    with model_libraries(spec.num_threads):
        from .loop import EngineLoop

        try:
            loop = EngineLoop(spec.build())
        except InputError as error:
            with contextlib.suppress(OSError):  # HTTP's process has ended
                pipe.send(("refusal", str(error)))
        else:
            _run_loop(loop, pipe)


def _run_loop(loop: EngineLoop, pipe: Connection) -> None:
    def send(kind: str, content: Any) -> None:
        """Tell HTTP's process something. Called in the engine's thread alone."""
        with contextlib.suppress(OSError):  # it has ended
            pipe.send((kind, content))

    send("info", loop.info)
    threading.Thread(target=_receive_orders, args=(loop, pipe), daemon=True).start()
    try:
        loop.run(partial(send, "tokens"), partial(send, "report"), partial(send, "step"))
    except EngineDeadError as error:
        send("death", str(error))
        raise SystemExit(1) from None


def _receive_orders(loop: EngineLoop, pipe: Connection) -> None:
    """Pass orders on, for as long as they come; then the engine ends. Nothing is said here: the
    engine's thread does.
    """
    try:
        with contextlib.suppress(EOFError, OSError):
            while True:
                orders = pipe.recv()
                loop.prepare(orders)
                loop.orders.put(orders)
    finally:
        loop.orders.put(Orders(is_last=True))


# --- how a process begins and ends ---------------------------------------------------------------


def started_process(name: str, work: Callable[..., object], *args: Any) -> BaseProcess:
    """A process of its own for some work.

    Raises:
        InputError: the system gives none.
    """
    process: BaseProcess = CONTEXT.Process(target=work, args=args, name=name)  # type: ignore[attr-defined]
    try:
        with ctrl_c_ignored():  # the child inherits it; the one to end it is this process
            process.start()
    except OSError as error:
        text = f"the system gives no process for the {name}: {error}. Raise `ulimit -u` or -v"
        raise InputError(text) from None
    return process


@contextlib.contextmanager
def ctrl_c_ignored() -> Iterator[None]:
    """Ctrl-C does nothing while the block runs, nor in processes that are started there."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def end_process(process: BaseProcess, seconds: float | None = None) -> None:
    """Wait `seconds` for a process to end (None: `STOP_SECONDS`), and then no longer."""
    process.join(STOP_SECONDS if seconds is None else seconds)
    process.kill()  # if it is there still
    process.join()


def ending_of(process: BaseProcess) -> str:
    """How a process has ended, or is ended now."""
    end_process(process)
    assert process.exitcode is not None
    if process.exitcode < 0:
        return f"was ended by {signal.Signals(-process.exitcode).name}"
    return f"has ended with exit code {process.exitcode}"


def follow_first_process(beat: Callable[[], object] = lambda: None) -> None:
    """What such a process does before all else: the first one says when to end, and how. When that
    has ended without a word, so does this one, at once.

    Args:
        beat: called every `BEAT_SECONDS`. All that it needs is the interpreter.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)

    def live() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        while parent.is_alive():
            beat()
            parent.join(BEAT_SECONDS)
        os._exit(1)

    threading.Thread(target=live, daemon=True).start()
