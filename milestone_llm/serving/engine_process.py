"""An engine in a process of its own, so that HTTP's Python and the engine's do not share a lock.

    HTTP's process                                           the engine's process
    EngineProcess  add_requests, abort, ...
                     -> orders -> a thread   -- pipe -->     a thread: EngineLoop.put
                   run: deliver              <-- pipe --     EngineLoop.run, in the main thread
                   problem                   <- a number --  a thread: when it last lived

One thread writes in each direction, so that messages come whole; and it is not HTTP's, which must
not wait for an engine that stands still. The engine's process is started before anything heavy is
loaded: HTTP's never imports torch. Neither outlives the other.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import TYPE_CHECKING, Any

from milestone_llm.core.errors import InputError
from milestone_llm.lab.cli import model_libraries

from .engine_client import Deliver, EngineDeadError, EngineInfo
from .engine_spec import EngineSpec
from .orders import OrderingClient
from .threads import started_thread, too_few

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

    from .engine_loop import EngineLoop

CONTEXT: BaseContext = multiprocessing.get_context("spawn")
"""A fresh interpreter: CUDA does not survive a fork."""
STOP_SECONDS = 10.0
"""For how long the step under way may go on when the server has ended; then it is cut off."""
BEAT_SECONDS = 1.0
"""How often the engine's process says that it lives. All that it needs for it is the interpreter:
a long step is no silence."""
SILENCE_SECONDS = 10.0
"""After so long without a sign of life, `/health` says that the engine stands still."""


class EngineProcess(OrderingClient):
    """An `EngineClient`, and the owner of the process. To be left with `with`."""

    info: EngineInfo
    """There once `wait_until_ready` has returned."""

    def __init__(self, spec: EngineSpec) -> None:
        super().__init__()
        self._pipe, inner = CONTEXT.Pipe()
        self._last_beat = CONTEXT.Value("d", time.monotonic(), lock=False)
        self._process = CONTEXT.Process(  # type: ignore[attr-defined]
            target=run_engine, args=(spec, inner, self._last_beat), name="engine"
        )
        self._is_stopping = threading.Event()
        self._writer = started_thread(self._send_orders, "orders", daemon=True)
        started_thread(self._cut_off, "end", daemon=True)
        try:
            with _ctrl_c_ignored():  # the child inherits it; the one to end it is this process
                self._process.start()
        except OSError as error:
            raise too_few("a process (engine)", error) from None
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
            raise EngineDeadError(f"the engine is dead: its process {self._ending()}") from None
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

    def stop(self) -> None:
        """Let `run` return after the step under way, or after `STOP_SECONDS`."""
        self._is_stopping.set()
        super().stop()

    # -- in threads of their own: later, the system might give none --------------------------

    def _cut_off(self) -> None:
        self._is_stopping.wait()
        multiprocessing.connection.wait([self._process.sentinel], STOP_SECONDS)
        self._process.kill()  # if it is there still

    def _send_orders(self) -> None:
        """Send what is ordered, until the last order. Waits where the engine does not read."""
        is_last = False
        try:
            with contextlib.suppress(OSError):  # the process has ended: `run` will say so
                while not is_last:
                    orders = self.orders.take()
                    self._pipe.send(orders)
                    is_last = orders.is_last
        except BaseException:  # nobody would be served any more, and nobody told
            self._process.kill()
            raise

    # -- in the main thread ------------------------------------------------------------------

    def run(self, deliver: Deliver) -> None:
        """Serve until `stop`.

        Raises:
            EngineDeadError: the engine gave up, or its process has ended.
        """
        while True:
            try:
                kind, *content = self._pipe.recv()
            except (EOFError, OSError):
                break
            if kind == "tokens":
                deliver(*content)
            elif kind == "report":
                self.take_report(*content)
            elif kind == "step":
                self.take_step(*content)
            else:
                raise EngineDeadError(*content)
        if not self._is_stopping.is_set():
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
        super().stop()
        self._end(STOP_SECONDS if error is None else 0.0)
        self._writer.join(STOP_SECONDS)  # nobody reads any more: its last order ends it
        self._pipe.close()

    def _end(self, seconds: float = STOP_SECONDS) -> None:
        """Wait for the process to end, and then no longer."""
        self._process.join(seconds)
        self._process.kill()  # if it is there still
        self._process.join()


# --- in the engine's process ----------------------------------------------------------------------


def run_engine(spec: EngineSpec, pipe: Connection, last_beat: Any) -> None:
    """What the engine's process does, from its beginning to its end.

    Args:
        last_beat: shared with HTTP's process: `time.monotonic()` of the last sign of life.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # HTTP's process says when to end, and how
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_live, args=(last_beat,), daemon=True).start()
    with model_libraries(spec.num_threads):
        from .engine_loop import EngineLoop

        try:
            loop = EngineLoop(spec.build())
        except InputError as error:
            _send(pipe, "refusal", str(error))
        else:
            _run_loop(loop, pipe)


def _run_loop(loop: EngineLoop, pipe: Connection) -> None:
    send = partial(_send, pipe)
    send("info", loop.info)
    threading.Thread(target=_receive_orders, args=(loop, pipe), daemon=True).start()
    try:
        loop.run(partial(send, "tokens"), partial(send, "report"), partial(send, "step"))
    except EngineDeadError as error:
        send("death", str(error))
        raise SystemExit(1) from None


@contextlib.contextmanager
def _ctrl_c_ignored() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _send(pipe: Connection, kind: str, *content: Any) -> None:
    """Tell HTTP's process something. Called in the engine's thread alone."""
    with contextlib.suppress(OSError):  # it has ended, and this one is about to
        pipe.send((kind, *content))


def _live(last_beat: Any) -> None:
    """Say that this process lives, and end it at once when HTTP's has ended without a word."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    while parent.is_alive():
        last_beat.value = time.monotonic()
        parent.join(BEAT_SECONDS)
    os._exit(1)


def _receive_orders(loop: EngineLoop, pipe: Connection) -> None:
    """Pass orders on, for as long as they come. Nothing is said here: the engine's thread does."""
    try:
        with contextlib.suppress(EOFError, OSError):
            while True:
                loop.orders.put(pipe.recv())
    finally:
        loop.stop()
