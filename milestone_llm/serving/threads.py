"""Threads that are there before they are needed."""

from __future__ import annotations

import threading
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
        text = f"the server needs {num_threads} threads ({name}): {error}. Raise `ulimit -u` or -v"
        raise InputError(text) from None
    return pool
