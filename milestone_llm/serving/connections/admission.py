"""Reject requests before their bodies are read: wrong host, no key, no room, too large."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import uuid
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..api.async_engine import AsyncEngine
from ..api.errors import ApiError
from ..config import ServerConfig

OPEN_PATHS = ("/health", "/ping", "/")
"""Paths that need no key. The page has no data of its own; it needs a key to ask for data."""


class AdmissionMiddleware:
    """Checks requests before the application. An accepted request has its salt in its `state`.

    A web page of a stranger, in a browser on this machine, may make its own name resolve to this
    server (DNS rebinding). Then it could read the answers. Its requests have that name as `Host`.
    """

    def __init__(self, app: ASGIApp, engine: AsyncEngine, config: ServerConfig) -> None:
        self._app = app
        self._engine = engine
        self._key_digests = [_digest(key) for key in config.api_key]
        self._hosts = {name.lower() for name in config.allowed_hosts}
        is_for_others = bool(config.api_key) or not _is_loopback(config.host)
        self._takes_any_host = is_for_others and not self._hosts
        self._bodies = BodyLimits(config.max_body_bytes, config.max_bodies_bytes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reject a request, or pass it on to the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with RequestBody(self._bodies, scope, receive, _named(scope, send)) as body:
            try:
                self._check(scope)
            except ApiError as error:
                response = error.response()
                if not body.is_complete:
                    response.headers["Connection"] = "close"
                await response(scope, body.receive, body.send)
            else:
                await self._app(scope, body.receive, body.send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        self._check_host(headers.get("host", ""))
        salt = self._salt_of(headers.get("authorization", ""))
        if salt is None and scope["path"] not in OPEN_PATHS:
            text = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, text, code="invalid_api_key")
        scope.setdefault("state", {})["cache_salt"] = salt
        length = headers.get("content-length", "")
        if length.isdigit():
            self._bodies.check(int(length))
        if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            self._engine.check_room(key_salt=salt or "")

    def _check_host(self, host: str) -> None:
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            name = ""
        if not (self._takes_any_host or name in self._hosts or _is_loopback(name)):
            text = f"this server is not called {host[:100]!r}: name it with --allowed-hosts"
            raise ApiError(421, text, code="host_not_allowed")

    def _salt_of(self, authorization: str) -> str | None:
        """Return the salt that separates the prefixes cached for a key; None for a wrong key.

        All keys are compared, each in constant time, so that the duration reveals nothing.
        """
        if not self._key_digests:
            return ""
        scheme, _, key = authorization.partition(" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, digest) for digest in self._key_digests]
        return given.hex() if any(found) and scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def _is_loopback(host: str) -> bool:
    """Return whether a name or an address always means the machine itself."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _named(scope: Scope, send: Send) -> Send:
    """Return a `send` that adds the request's id to the answer: the client's own if valid, or a new
    one."""
    own = Headers(scope=scope).get("x-request-id", "")
    is_good = 0 < len(own) <= 128 and own.isascii() and own.isprintable()
    header = b"x-request-id", (own if is_good else uuid.uuid4().hex).encode()

    async def send_with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message.get("headers", ()), header]}
        await send(message)

    return send_with_id


# --- bodies --------------------------------------------------------------------------------------


FREE_BYTES = 2**16
"""Bytes of each body that are not counted in the total, so that small requests are never
rejected."""
LINGER_SECONDS = 1.0
"""Seconds for which the rest of a body is read from a client that has its answer already."""


@dataclass
class BodyLimits:
    """Limits on the memory of the bodies that are being read or answered."""

    max_bytes: int
    """Most bytes of one body."""
    max_total_bytes: int
    """Most bytes of all bodies, without the first `FREE_BYTES` of each."""
    num_bytes: int = 0
    """Bytes now, counted in the same way."""

    def check(self, num_bytes: int) -> None:
        """Reject a body of `num_bytes` bytes that is too large.

        Raises:
            ApiError: 413.
        """
        if num_bytes > self.max_bytes:
            text = f"the body is larger than {self.max_bytes} bytes"
            raise ApiError(413, text, headers={"Connection": "close"})


class RequestBody:
    """The body of one request. Use it in a `with` block, which ends when the body is not needed any
    more."""

    def __init__(self, limits: BodyLimits, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        self._announced = int(length) if length.isdigit() and len(length) < 20 else 0
        self.is_complete = not {"transfer-encoding", "content-length"} & set(headers)
        self._limits = limits
        self._receive, self._send = receive, send
        self._num_bytes = self._num_counted = 0

    async def receive(self) -> Message:
        """Receive the next part of the body, as ASGI's `receive`.

        Raises:
            ApiError: 413 when the body is too large, 503 when those of all requests are.
        """
        message = await self._receive()
        self.is_complete = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        self._limits.check(self._num_bytes)
        # An announced length is reserved at once: otherwise bodies that arrive together would share
        # the memory until none of them fits.
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
        """Send a part of the answer, as ASGI's `send`. Before the last part, the rest of the body
        is read and dropped: to close a connection with unread data resets it, and the client might
        never see its answer."""
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
