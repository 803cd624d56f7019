"""The server's two threads: HTTP runs in a thread of its own, the engine's client in the main one.

The client reads what the engine's process sends, or it is the engine itself (`--debug`). Then a
`breakpoint()` in it stops in a usable pdb while HTTP goes on. Signals arrive in the main thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import uvicorn
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from milestone_llm.consoles import log_console

from .api.app import build_app
from .api.async_engine import AsyncEngine
from .api.metrics import Metrics, StatsLog
from .api.service import Service
from .config import ServerConfig
from .connections.admission import AdmissionMiddleware
from .connections.connection import HttpConnection
from .engine.client import EngineClient, EngineDeadError

log = logging.getLogger(__name__)

DEATH_SECONDS = 1.0
"""Seconds for which `/health` still answers that the engine is dead."""
CLOSING_SECONDS = 2
"""Seconds that a client may take to read the end of its answer when the server ends."""
ACCEPTED_AT_ONCE = 8
"""Connections that the event loop accepts in a row. Each has a file descriptor before it is
counted."""
BACKLOG = 2048
"""Clients that may wait in the kernel to be accepted."""
SWITCH_SECONDS = 0.0005
"""Seconds that the main thread waits for HTTP's thread, at most, when it has a message."""


class Server:
    """Serves an engine over HTTP until SIGTERM or Ctrl-C ends it."""

    def __init__(self, client: EngineClient, config: ServerConfig) -> None:
        self._client = client
        self._config = config
        if name := config.served_model_name:
            client.info = dataclasses.replace(client.info, model_name=name)
        logging.getLogger("milestone_llm").setLevel(config.log_level.upper())
        has_access_log = config.log_level in ("info", "debug")
        info = client.info
        self._engine = AsyncEngine(
            client,
            Metrics(info.model_name, info.engine),
            info.max_num_seqs + config.max_queued,
            len(set(config.api_key)),
        )
        app = build_app(Service(self._engine, config.has_page, config.reasoning_content))
        http: ASGIApp = AdmissionMiddleware(app, self._engine, config)
        if config.allowed_origins:  # outermost: a browser's preflight request has no key
            origins = [origin.lower() for origin in config.allowed_origins]
            http = CORSMiddleware(http, origins, ("GET", "POST"), ("*",), expose_headers=("*",))
        connection: Any = functools.partial(HttpConnection, limits=config)
        self._http = uvicorn.Server(
            uvicorn.Config(
                http,
                http=connection,
                ws="none",
                backlog=ACCEPTED_AT_ONCE,
                # Errors of clients are in their answers.
                log_level=config.log_level if has_access_log else "error",
                access_log=has_access_log,
                lifespan="off",
                timeout_graceful_shutdown=CLOSING_SECONDS,
            )
        )
        self._has_started = threading.Event()
        self._event_loop: asyncio.AbstractEventLoop
        """HTTP's, once it has started."""
        self._ending: asyncio.Task[None] | None = None

    def run(self, listener: socket.socket, on_ready: Callable[[], None]) -> bool:
        """Serve on a listening socket, from the main thread.

        Args:
            on_ready: called when the server accepts requests.

        Returns:
            False if the engine died.
        """
        http = threading.Thread(target=self._run_http, args=(listener,), name="http")
        http.start()
        try:
            self._has_started.wait()
            with self._signals_handled(), _short_switches():
                if self._http.started:
                    on_ready()
                self._client.run(functools.partial(self._engine.deliver, self._event_loop))
        except EngineDeadError as error:
            log.error("%s", error)
            self.end(str(error), 0.0, DEATH_SECONDS)
            return False
        except BaseException:
            self.end("it was interrupted", 0.0)
            raise
        finally:
            http.join()
        return True

    def _run_http(self, listener: socket.socket) -> None:
        try:
            asyncio.run(self._serve_http(listener))
        finally:
            self._has_started.set()
            self._client.stop()

    async def _serve_http(self, listener: socket.socket) -> None:
        self._event_loop = asyncio.get_running_loop()
        serving = asyncio.ensure_future(self._http.serve(sockets=[listener]))
        while not (self._http.started or serving.done()):
            await asyncio.sleep(0.001)
        if self._http.started:
            listener.listen(BACKLOG)  # asyncio passes ACCEPTED_AT_ONCE
        self._has_started.set()
        if self._config.disable_log_stats:
            await serving
            return
        stats_log = StatsLog(_print_stats)
        following = asyncio.ensure_future(stats_log.follow(self._client, self._engine.metrics))
        await serving
        following.cancel()

    @contextlib.contextmanager
    def _signals_handled(self) -> Iterator[None]:
        numbers = [signal.SIGTERM, *([] if self._config.debug else [signal.SIGINT])]
        before = {number: signal.signal(number, self._on_signal) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if num_open := self._engine.num_open:
            again = "; Ctrl-C again ends them at once" * (number == signal.SIGINT)
            log.warning(
                "%s: requests under way (%d) may finish within %g s%s",
                signal.Signals(number).name,
                num_open,
                self._config.drain_seconds,
                again,
            )
        if number == signal.SIGINT:
            signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # a second Ctrl-C ends the server at once
        self.end("the server is draining", self._config.drain_seconds)

    def end(self, reason: str, drain_seconds: float, linger_seconds: float = 0.0) -> None:
        """Admit no more requests, let open ones finish for `drain_seconds`, then end HTTP."""

        async def end() -> None:
            self._engine.close(reason)
            await self._engine.wait_until_empty(drain_seconds)
            self._engine.fail_all(f"the request was not finished: {reason}")
            await self._engine.wait_until_empty(CLOSING_SECONDS)
            await asyncio.sleep(linger_seconds)
            self._http.should_exit = True

        def begin() -> None:
            self._ending = asyncio.ensure_future(end())

        self._has_started.wait()
        with contextlib.suppress(RuntimeError):  # HTTP has ended
            self._event_loop.call_soon_threadsafe(begin)


def _print_stats(line: str) -> None:
    with log_console.capture() as captured:  # else rich would keep all lines that it cannot write
        log_console.print(line, style="dim", soft_wrap=True)
    with contextlib.suppress(OSError, ValueError):  # the disk is full, or the log's reader has gone
        log_console.file.write(captured.get())
        log_console.file.flush()


@contextlib.contextmanager
def _short_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
