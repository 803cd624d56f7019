"""Threads that are there before they are needed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from milestone_llm.core.errors import InputError


def started_threads(num_threads: int, name: str) -> ThreadPoolExecutor:
    """A pool whose threads all run: later, the system might give none, and a request would fail.

    Raises:
        InputError: it gives none now.
    """
    pool, all_run = ThreadPoolExecutor(num_threads, name), threading.Barrier(num_threads + 1)
    try:
        for _ in range(num_threads):
            pool.submit(all_run.wait)  # none is free for the next, so that one more is started
        all_run.wait()
    except RuntimeError as error:
        all_run.abort()
        raise too_few(f"{num_threads} threads ({name})", error) from None
    return pool


def started_thread(work: Callable[[], object], name: str, daemon: bool = False) -> threading.Thread:
    """A thread of its own for some work.

    Raises:
        InputError: the system gives none.
    """
    thread = threading.Thread(target=work, name=name, daemon=daemon)
    try:
        thread.start()
    except RuntimeError as error:
        raise too_few(f"a thread ({name})", error) from None
    return thread


def too_few(what: str, error: Exception) -> InputError:
    """What to say where the system gives too few threads or processes."""
    return InputError(f"the server needs {what}: {error}. Raise `ulimit -u` or -v")
