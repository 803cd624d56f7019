"""How much of bodies is taken in, and how a request ends whose body is not read."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from .errors import ApiError

FREE_BYTES = 2**16
"""Of each body, not counted with those of others: whoever asks for little is always heard."""
LINGER_SECONDS = 1.0
"""For how long the rest of a body is taken from a client that has its answer already."""


@dataclass
class BodyLimits:
    """What may lie in memory of the requests that are being read or answered."""

    max_bytes: int
    """Of one request."""
    max_total_bytes: int
    """Of all, but for the first `FREE_BYTES` of each."""
    num_bytes: int = 0
    """There are of these now."""

    def check(self, num_bytes: int) -> None:
        """Refuse a body of so many bytes.

        Raises:
            ApiError: it is too large.
        """
        if num_bytes > self.max_bytes:
            text = f"the body is larger than {self.max_bytes} bytes"
            raise ApiError(413, text, headers={"Connection": "close"})


class RequestBody:
    """The body of one request. To be left with `with`, when it is no longer in memory."""

    def __init__(self, limits: BodyLimits, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        self._announced = int(length) if length.isdigit() and len(length) < 20 else 0
        self.is_complete = not {"transfer-encoding", "content-length"} & set(headers)
        self._limits = limits
        self._receive, self._send = receive, send
        self._num_bytes = self._num_counted = 0

    async def receive(self) -> Message:
        """ASGI's `receive`.

        Raises:
            ApiError: 413 when the body is too large, 503 when those of all requests are.
        """
        message = await self._receive()
        self.is_complete = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        self._limits.check(self._num_bytes)
        # What is announced has its room from the beginning: bodies that come side by side would
        # share out the room until none of them fits.
        expected = max(self._num_bytes, self._announced)
        more = max(0, expected - FREE_BYTES) - self._num_counted
        num_bytes = self._limits.num_bytes
        if more and num_bytes + more > self._limits.max_total_bytes:
            text = f"the bodies of all requests have {num_bytes} bytes and may have "
            text += f"{self._limits.max_total_bytes} at a time. Try again later."
            raise ApiError(503, text, headers={"Retry-After": "1", "Connection": "close"})
        self._num_counted += more
        self._limits.num_bytes += more
        return message

    async def send(self, message: Message) -> None:
        """ASGI's `send`. Before the end of an answer, the rest of the body is thrown away: to close
        a connection with something unread resets it, and the client might never see its answer.
        """
        is_last = message["type"] == "http.response.body" and not message.get("more_body")
        if is_last and not self.is_complete:
            await self._send({**message, "more_body": True})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._throw_away(), LINGER_SECONDS)
            message = {"type": "http.response.body"}
        await self._send(message)

    async def _throw_away(self) -> None:
        while (await self._receive()).get("more_body"):
            pass

    def __enter__(self) -> RequestBody:
        return self

    def __exit__(self, *error: object) -> None:
        self._limits.num_bytes -= self._num_counted
