"""The processes beside a server's first one: how they start, and that none of them outlives it."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any

from milestone_llm.core.errors import InputError

if TYPE_CHECKING:
    from multiprocessing.context import BaseContext

CONTEXT: BaseContext = multiprocessing.get_context("spawn")
"""A fresh interpreter: CUDA does not survive a fork."""
STOP_SECONDS = 10.0
"""For how long a process may go on when it has to end; then it is cut off."""
BEAT_SECONDS = 1.0
"""How often a process looks whether the first one is still there."""


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
