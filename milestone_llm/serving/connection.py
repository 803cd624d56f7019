"""One client's connection: uvicorn's, with an end for clients that ask but do not read."""

from __future__ import annotations

import asyncio
from typing import cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

WRITE_SECONDS = 60.0
"""For how long a client may leave unread what it was sent; then its connection is closed."""


class HttpConnection(HttpToolsProtocol):
    """Hangs up on a client that takes nothing for `WRITE_SECONDS`.

    What it was sent waits in the kernel's buffer, and if that is full, here. An answer waits with
    what follows (its tokens are kept, and no more than it may have), and ends with the connection.
    """

    _hanging_up: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Count whatever the kernel does not take as unread."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=0)

    def pause_writing(self) -> None:
        """The client is behind."""
        super().pause_writing()
        transport = cast(asyncio.WriteTransport, self.transport)
        self._hanging_up = self.loop.call_later(WRITE_SECONDS, transport.abort)

    def resume_writing(self) -> None:
        """It has read everything."""
        self._stop_waiting()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _stop_waiting(self) -> None:
        if self._hanging_up is not None:
            self._hanging_up.cancel()
