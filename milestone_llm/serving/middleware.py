"""Requests that are refused unread: without a key, one too many, or with too large a body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .async_engine import AsyncEngine
from .errors import ApiError

BODY_SECONDS = 30.0
"""A body that is not there after this time is not waited for."""

OPEN_PATHS = ("/health", "/")
"""Paths that need no key. The page itself tells nothing; what it shows, it asks for with a key."""


class ApiKeys:
    """The keys that open the server. None: it is open to all."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key) for key in keys]

    def salt_of(self, authorization: str | None) -> str | None:
        """What sets the prefixes apart that are cached for a key; None for a key that is wrong.

        All keys are compared, each in constant time: how long it takes tells nothing.
        """
        if not self._digests:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        given = _digest(key.strip())
        found = [hmac.compare_digest(given, digest) for digest in self._digests]
        return given.hex() if any(found) and scheme.lower() == "bearer" else None


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class AdmissionMiddleware:
    """In front of the application. What it lets in carries its salt in the request's state.

    Args:
        max_body_bytes: of one request.
    """

    def __init__(
        self, app: ASGIApp, engine: AsyncEngine, keys: ApiKeys, max_body_bytes: int
    ) -> None:
        self._app = app
        self._engine = engine
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            self._check(scope)
        except ApiError as error:
            response = error.response()
            if scope["method"] == "POST":  # its body lies unread on the connection
                response.headers["Connection"] = "close"
            await response(scope, receive, send)
            return
        await self._app(scope, self._limited(receive), send)

    def _check(self, scope: Scope) -> None:
        headers = Headers(scope=scope)
        salt = self._keys.salt_of(headers.get("authorization"))
        if salt is None and scope["path"] not in OPEN_PATHS:
            text = "the API key is missing or wrong: send it as `Authorization: Bearer KEY`"
            raise ApiError(401, text, code="invalid_api_key")
        scope.setdefault("state", {})["cache_salt"] = salt
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large()
        if scope["method"] == "POST" and scope["path"].startswith("/v1/"):
            self._engine.check_room()

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self._max_body_bytes} bytes")

    def _limited(self, receive: Receive) -> Receive:
        num_bytes, is_complete = 0, False

        async def limited() -> Message:
            nonlocal num_bytes, is_complete
            if is_complete:  # what comes now is the end of the connection
                return await receive()
            try:
                message = await asyncio.wait_for(receive(), BODY_SECONDS)
            except asyncio.TimeoutError:
                raise ApiError(408, f"no body came within {BODY_SECONDS:.0f} s") from None
            num_bytes += len(message.get("body", b""))
            is_complete = not message.get("more_body", False)
            if num_bytes > self._max_body_bytes:
                raise self._too_large()
            return message

        return limited
