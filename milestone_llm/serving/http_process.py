"""One more process for HTTP: it serves at the same address, and has the same engine.

    the first process                          this one
    HttpProcess  end, wait_until_ready  -->    run_http: a `Server` with an `EngineConnection`

All of them accept from one socket, so that a client gets one that has time. What they count
together is in `SharedCounts`. Only the first gets signals, and says when the others are to end.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing.connection
import os
import socket
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from milestone_llm.core.errors import InputError
from milestone_llm.frontend.garbage import freeze_garbage

from . import processes
from .engine_client import EngineDeadError
from .engine_process import EngineConnection
from .shared_counts import SharedCounts

MAX_PROCESSES, CORES_OF_ONE = 2, 4
"""Processes for HTTP beside a GPU, unless a number is given, and cores for each of them."""
MOST_PROCESSES = 64
"""Each takes 200 MB or so."""


def num_http_processes(args: argparse.Namespace) -> int:
    """How many processes HTTP has.

    Raises:
        InputError: too many are asked for, or more than one and the engine has none of its own.
    """
    if (args.http_processes or 1) > MOST_PROCESSES:
        text = f"--http-processes {args.http_processes} is more than {MOST_PROCESSES}"
        raise InputError(f"{text}, and beyond the cores that are free they gain nothing")
    is_alone = args.debug or args.replicas
    if is_alone and (args.http_processes or 1) > 1:
        raise InputError(
            "--http-processes is for an engine with a process of its own: not for "
            "--debug or --replicas"
        )
    if args.http_processes is not None or is_alone:
        return args.http_processes or 1
    has_gpu = args.device in (None, "cuda") and any(Path("/dev").glob("nvidia[0-9]*"))
    return max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) // CORES_OF_ONE)) if has_gpu else 1


class HttpProcess:
    """Starts such a process, and owns it. To be left with `with`.

    Args:
        number: from 1 on; the first process has 0.
        args: of the server's command line.
        listener: from which all accept.
    """

    def __init__(
        self, number: int, args: argparse.Namespace, listener: socket.socket, shared: SharedCounts
    ) -> None:
        self.engines_end, engine = processes.CONTEXT.Pipe()
        """Of its pipe to the engine's process."""
        self._first, first = processes.CONTEXT.Pipe()
        self._process = processes.started_process(
            f"HTTP {number}", run_http, number, args, listener, shared, engine, first
        )
        engine.close()
        first.close()

    def wait_until_ready(self) -> None:
        """Wait until it serves.

        Raises:
            InputError: it cannot, or has ended.
        """
        try:
            problem = self._first.recv()
        except EOFError:
            problem = f"a process of HTTP {self.ending()}"
        if problem is not None:
            raise InputError(problem)

    def end(self, reason: str, drain_seconds: float, linger_seconds: float) -> None:
        """Tell it to end, see `Server.end`."""
        with contextlib.suppress(OSError):  # it has ended
            self._first.send((reason, drain_seconds, linger_seconds))

    def wait(self, seconds: float | None = None) -> None:
        """Wait until it has ended, but not longer than this."""
        multiprocessing.connection.wait([self._process.sentinel], seconds)

    def ending(self) -> str:
        """How it has ended."""
        return processes.ending_of(self._process)

    def __enter__(self) -> HttpProcess:
        return self

    def __exit__(self, *error: object) -> None:
        processes.end_process(self._process, 0.0)
        self._first.close()


def run_http(
    number: int,
    args: argparse.Namespace,
    listener: socket.socket,
    shared: SharedCounts,
    engine: Connection,
    first: Connection,
) -> None:
    """What the process does.

    Args:
        engine: the pipe to the engine's process.
        first: to HTTP's first process.
    """
    processes.follow_first_process()
    from .limits import Limits  # a second, which the first process spends at the same time
    from .server import Server

    with contextlib.suppress(EngineDeadError):  # the first process says so
        try:
            client = EngineConnection(engine, shared, number)
            client.wait_until_ready()
            server = Server(client, Limits.of(args, listener), shared.of(number))
        except InputError as error:
            first.send(str(error))
            return

        def follow() -> None:
            while True:
                server.end(*first.recv())

        threading.Thread(target=follow, daemon=True).start()
        freeze_garbage()
        server.run(listener, lambda: first.send(None))
