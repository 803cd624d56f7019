"""One client's connection: uvicorn's, with time limits for slow clients."""

from __future__ import annotations

import asyncio
import itertools
from enum import Enum, auto
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ..api.errors import ApiError
from ..config import MAX_CONNECTIONS, ServerConfig

WRITE_SECONDS = 60.0
"""Seconds that a client may leave data unread; then its connection is closed."""
MAX_HEAD_BYTES = 2**16
"""Largest first line and headers of a request; also the most bytes between and after parts of a
body."""
MAX_WITHOUT_PLACE = 16
"""Connections over the limit whose request is still read, because it may ask for `/health`."""


class Part(Enum):
    """The part of a request that is being received."""

    NOTHING = auto()
    HEAD = auto()
    BODY = auto()


class HttpConnection(HttpToolsProtocol):
    """Closes the connection of a client that does not finish its request in time, or reads nothing.

    Data for the client waits in the kernel's buffer and, if that is full, here. The tokens that
    follow wait with the answer; there are no more than the request may have. When the connection
    ends, they are dropped.

    Requests are handled one at a time. A request that comes before the answer to the last one is
    not read, and the connection is closed after that answer.
    """

    def __init__(self, *args: Any, limits: ServerConfig, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_seconds, self._body_seconds = limits.request_seconds
        self._max_connections = limits.max_connections or MAX_CONNECTIONS
        self._part = Part.NOTHING
        self._num_pending_bytes = 0
        """Bytes received since the parser last passed something on."""
        self._has_place = False
        """Whether it counts as one of `max_connections`."""
        self._asking: asyncio.TimerHandle | None = None
        """Runs while the connection waits for a request or receives one."""
        self._hanging_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Set up the connection: everything that the kernel does not take at once counts as
        unread."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)
        if not self._takes_place():
            others = self._others_asking(have_place=False)
            if len(others) >= MAX_WITHOUT_PLACE:
                others[0]._refuse(self._all_in_use())
        self._ask_within(self._head_seconds)

    def _takes_place(self) -> bool:
        """Take one of `max_connections`. If all are taken, close a connection that has no request.

        The one that should have sent its request first is closed. Returns False if all of them
        wait for answers.
        """
        num_places = sum(cast(HttpConnection, each)._has_place for each in self.connections)
        self._has_place = True
        if num_places >= self._max_connections:
            if others := self._others_asking(have_place=True):
                others[0]._give_up(self._all_in_use())
            else:
                self._has_place = False
        return self._has_place

    def _others_asking(self, have_place: bool) -> list[HttpConnection]:
        """Return the other connections that wait for a request; the one that should have sent it
        first is first."""
        others = [cast(HttpConnection, each) for each in self.connections if each is not self]
        asking = {each: each._asking.when() for each in others if each._asking is not None}
        some = [each for each in asking if each._has_place == have_place]
        return sorted(some, key=asking.__getitem__)

    def _all_in_use(self) -> ApiError:
        text = f"all {self._max_connections} connections are in use"
        return ApiError(503, text, headers={"Retry-After": "1"})

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection is lost."""
        self._has_place = False
        self._stop_asking()
        self._stop_waiting()
        super().connection_lost(exc)

    # -- a request is received ---------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        """Parse data, and reject a request that makes no progress."""
        self._num_pending_bytes += len(data)
        super().data_received(data)
        if self._num_pending_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def on_message_begin(self) -> None:
        """Begin a request."""
        if self._is_answering:
            raise ValueError("a request before the answer to the last")  # the parser stops
        super().on_message_begin()
        self._part = Part.HEAD

    def on_headers_complete(self) -> None:
        """Start the application."""
        if len(self.url) + sum(map(len, itertools.chain(*self.headers))) > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())
            raise ValueError("too large a head")
        if not (self._has_place or self._asks_for_health() or self._takes_place()):
            self._refuse(self._all_in_use())
            raise ValueError("a request beyond the limit")
        super().on_headers_complete()
        if not self._has_place:
            self.cycle.keep_alive = False
        self._part, self._num_pending_bytes = Part.BODY, 0
        self._ask_within(self._body_seconds)

    def _asks_for_health(self) -> bool:
        """Return whether this is a health probe: a server with all connections in use is
        healthy."""
        path, _, _ = self.url.partition(b"?")
        return path == b"/health" and self.parser.get_method() in (b"GET", b"HEAD")

    def on_body(self, body: bytes) -> None:
        """Receive a part of the body."""
        super().on_body(body)
        self._num_pending_bytes = 0

    def on_message_complete(self) -> None:
        """End a request: all of it has been received."""
        super().on_message_complete()
        self._part, self._num_pending_bytes = Part.NOTHING, 0
        self._stop_asking()
        if self.cycle.response_complete:
            self._ask_within(self._head_seconds)

    def on_response_complete(self) -> None:
        """Wait for the next request, if this one has been received."""
        super().on_response_complete()
        if self._part is Part.NOTHING:
            self._ask_within(self._head_seconds)

    def send_400_response(self, msg: str) -> None:
        """Answer when the parser cannot go on. For uvicorn."""
        if self._is_answering:
            self.cycle.keep_alive = False
        else:
            self._refuse(ApiError(400, "the request is no valid HTTP"))

    @property
    def _is_answering(self) -> bool:
        """Whether a received request waits for its answer, or for more of it."""
        is_open = self.cycle is not None and not self.cycle.response_complete
        return is_open and self._part is Part.NOTHING

    # -- the end -----------------------------------------------------------------------------

    def _ask_within(self, seconds: float) -> None:
        self._stop_asking()
        self._asking = self.loop.call_later(seconds, self._time_out, seconds)

    def _stop_asking(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            self._asking = None

    def _time_out(self, seconds: float) -> None:
        part = "body" if self._part is Part.BODY else "head"
        self._give_up(ApiError(408, f"the {part} of the request took longer than {seconds:g} s"))

    def _give_up(self, error: ApiError) -> None:
        """Close a connection that waits for a request. A client that has begun one gets the
        error."""
        self._stop_asking()
        if self._part is Part.NOTHING:
            self.transport.close()
        else:
            self._refuse(error)

    def _refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and close the connection."""
        if self.transport.is_closing():
            return
        if self.transport.get_write_buffer_size():  # it has not read what was sent before, either
            self.transport.abort()
            return
        is_answered = self._part is Part.BODY and self.cycle.response_started
        if not (is_answered or self._is_answering):
            response = error.response()
            lines = [STATUS_LINE[response.status_code], b"connection: close\r\n"]
            lines += [b"%s: %s\r\n" % header for header in response.raw_headers]
            self.transport.write(b"".join([*lines, b"\r\n", bytes(response.body)]))
        self.transport.close()

    # -- an answer is not read ---------------------------------------------------------------

    def pause_writing(self) -> None:
        """Start the timer: the client does not read."""
        super().pause_writing()
        self._hanging_up = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the timer: the client has read everything."""
        self._stop_waiting()
        super().resume_writing()

    def _stop_waiting(self) -> None:
        if self._hanging_up is not None:
            self._hanging_up.cancel()


def _head_too_large() -> ApiError:
    return ApiError(431, f"the head of the request is larger than {MAX_HEAD_BYTES} bytes")
