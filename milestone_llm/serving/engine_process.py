"""An engine in a process of its own, so that HTTP's Python and the engine's do not share a lock.

    a process of HTTP                                        the engine's process
    EngineConnection  add_requests, abort, ...
                     -> orders -> a thread   -- pipe -->     a thread: EngineLoop.put
                   run: deliver              <-- pipe --     EngineLoop.run, in the main thread
                   problem                   <- a number --  a thread: when it last lived

Each of HTTP's processes has a pipe of its own. One thread writes in each direction, so that
messages come whole; and it is not HTTP's, which must not wait for an engine that stands still. The
first process of HTTP starts that of the engine, before anything heavy is loaded: HTTP's never
import torch. None outlives the first.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any

from milestone_llm.command.cli import model_libraries
from milestone_llm.core.errors import InputError
from milestone_llm.trace.records import StepRecord

from . import processes
from .engine_client import (
    Deliver,
    EngineCoreOutputs,
    EngineDeadError,
    EngineInfo,
    EngineReport,
)
from .engine_spec import EngineSpec
from .orders import OrderingClient, Orders
from .shared_counts import SharedCounts
from .threads import started_thread

if TYPE_CHECKING:
    from .engine_loop import EngineLoop

SILENCE_SECONDS = 10.0
"""After so long without a sign of life, `/health` says that the engine stands still."""


class EngineConnection(OrderingClient):
    """The `EngineClient` of one of HTTP's processes.

    Args:
        pipe: to the engine's process.
        sender: which of HTTP's processes this is.
    """

    info: EngineInfo
    """There once `wait_until_ready` has returned."""

    def __init__(self, pipe: Connection, shared: SharedCounts, sender: int) -> None:
        super().__init__(sender)
        self._pipe, self._shared = pipe, shared
        self._writer = started_thread(self._send_orders, "orders", daemon=True)

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
        return EngineDeadError("the engine is dead")

    # -- for HTTP ----------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """That the engine's process gives no sign of life. It may be stopped, or swapped out."""
        silence = time.monotonic() - self._shared.last_beat.value
        if silence < SILENCE_SECONDS:
            return None
        return f"the engine has given no sign of life for {silence:.0f} s"

    def stop(self) -> None:
        """Hang up: `run` returns, and the engine drops what was asked for here."""
        super().stop()
        self._hang_up()

    # -- in a thread of its own: later, the system might give none ---------------------------

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
            EngineDeadError: the engine gave up.
        """
        while True:
            try:
                kind, *content = self._pipe.recv()
            except (EOFError, OSError):
                return
            if kind == "tokens":
                deliver(*content)
            elif kind == "report":
                self.take_report(*content)
            elif kind == "step":
                self.take_step(*content)
            else:
                raise EngineDeadError(*content)


class EngineProcess(EngineConnection):
    """The connection of HTTP's first process, and the owner of the engine's. To be left with
    `with`.

    Args:
        others: ends of pipes to the other processes of HTTP, in their order.
    """

    def __init__(
        self, spec: EngineSpec, shared: SharedCounts, others: Sequence[Connection] = ()
    ) -> None:
        pipe, inner = processes.CONTEXT.Pipe()
        super().__init__(pipe, shared, 0)
        self._is_stopping = threading.Event()
        self._process = processes.started_process(
            "engine", run_engine, spec, [inner, *others], shared
        )
        for end in (inner, *others):
            end.close()

    def stop(self) -> None:
        """Let the engine's process end after the step under way."""
        self._is_stopping.set()
        super().stop()

    def run(self, deliver: Deliver) -> None:
        """Serve until `stop`.

        Raises:
            EngineDeadError: the engine gave up, or its process has ended.
        """
        super().run(deliver)
        if not self._is_stopping.is_set():
            raise self._death()

    def _death(self) -> EngineDeadError:
        ending = processes.ending_of(self._process)
        return EngineDeadError(f"the engine is dead: its process {ending}")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()
        processes.end_process(self._process, None if error is None else 0.0)
        self._writer.join(processes.STOP_SECONDS)
        self._pipe.close()


# --- in the engine's process ----------------------------------------------------------------------


def run_engine(spec: EngineSpec, pipes: Sequence[Connection], shared: SharedCounts) -> None:
    """What the engine's process does, from its beginning to its end.

    Args:
        pipes: to each of HTTP's processes.
    """

    def beat() -> None:
        shared.last_beat.value = time.monotonic()

    processes.follow_first_process(beat)
    with model_libraries(spec.num_threads):
        from .engine_loop import EngineLoop

        try:
            loop = EngineLoop(spec.build())
        except InputError as error:
            _send(pipes[0], "refusal", str(error))
        else:
            _run_loop(loop, pipes)


def _run_loop(loop: EngineLoop, pipes: Sequence[Connection]) -> None:
    def deliver(message: EngineCoreOutputs) -> None:
        _send(pipes[message.sender], "tokens", message)

    def on_report(reports: list[EngineReport]) -> None:
        for pipe in pipes:  # who has not asked lets it be
            _send(pipe, "report", reports)

    def on_step(record: StepRecord) -> None:
        for sender in loop.watching:
            _send(pipes[sender], "step", record)

    for sender, pipe in enumerate(pipes):
        _send(pipe, "info", loop.info)
        receive = partial(_receive_orders, loop, pipe, sender)
        threading.Thread(target=receive, daemon=True).start()
    try:
        loop.run(deliver, on_report, on_step)
    except EngineDeadError as error:
        _send(pipes[0], "death", str(error))
        raise SystemExit(1) from None


def _send(pipe: Connection, kind: str, *content: Any) -> None:
    """Tell one of HTTP's processes something. Called in the engine's thread alone."""
    with contextlib.suppress(OSError):  # it has ended
        pipe.send((kind, *content))


def _receive_orders(loop: EngineLoop, pipe: Connection, sender: int) -> None:
    """Pass orders on, for as long as they come. Nothing is said here: the engine's thread does.
    With the first process, the engine ends.
    """
    try:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.orders.put(pipe.recv())
    finally:
        loop.orders.put(Orders(gone={sender}, is_last=sender == 0))
