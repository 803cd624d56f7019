"""Requests that are refused unread: for another host, without a key, one too many, too large."""

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

OPEN_PATHS = ("/health", "/")
"""Paths that need no key. The page itself tells nothing; what it shows, it asks for with a key."""


class AdmissionMiddleware:
    """In front of the application. What it lets in carries its salt in the request's state.

    The page of a stranger in a browser on this machine may have its own name lead here (DNS
    rebinding), and would then read what it is answered. Its requests carry that name as their Host.
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
        """Refuse a request or pass it on."""
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
            self._engine.check_room()

    def _check_host(self, host: str) -> None:
        try:
            name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
        except ValueError:
            name = ""
        if not (self._takes_any_host or name in self._hosts or _is_loopback(name)):
            text = f"this server is not called {host[:100]!r}: name it with --allowed-hosts"
            raise ApiError(421, text, code="host_not_allowed")

    def _salt_of(self, authorization: str) -> str | None:
        """What sets the prefixes apart that are cached for a key; None for a key that is wrong.

        All keys are compared, each in constant time: how long it takes tells nothing.
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
    """Whether a name or an address leads to the machine itself, wherever it is used."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def _named(scope: Scope, send: Send) -> Send:
    """`send` whose answer says the request's id: the client's own, if it is one, or a new one."""
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
