"""JSON of requests, counted before it is parsed: no body costs more than it could be for.

What is parsed is text, all of it: half of a surrogate pair, NaN and numbers of thousands of digits
are no JSON here, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from .errors import ApiError


@dataclass(frozen=True)
class JsonLimits:
    """How much a body may hold, whatever its fields are called."""

    max_parts: int
    """Texts (names of fields, too), lists and objects."""
    max_values: int
    """Values in lists and objects, numbers above all."""


def parse_json(body: bytes, limits: JsonLimits) -> Any:
    """The data of a body.

    Raises:
        ApiError: it is no JSON, or holds more than the limits allow.
    """
    # What escapes ends no text; without it, every second part between quotes is structure.
    body_of_marks = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_parts = body_of_marks.count(b'"') // 2
    if num_parts <= limits.max_parts:
        structure = b"".join(body_of_marks.split(b'"')[::2])
        num_parts += structure.count(b"[") + structure.count(b"{")
        _check("values", structure.count(b",") + 1, limits.max_values)
    _check("lists, objects and texts", num_parts, limits.max_parts)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        text = "the body is no valid JSON (UTF-8 text, no NaN, no half of a surrogate pair)"
        raise ApiError(400, f"{text}: {error}") from None


def _check(what: str, count: int, limit: int) -> None:
    if count > limit:
        text = f"the body has {count:,} {what}, and a request to this model may have at most "
        raise ApiError(400, f"{text}{limit:,}")


def counting_route(limits: JsonLimits) -> type[APIRoute]:
    """The class of FastAPI's routes whose bodies are read by `parse_json`."""

    class CountedRequest(Request):
        async def json(self) -> Any:
            return parse_json(await self.body(), limits)

    class CountingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_counted(request: Request) -> Response:
                return await handle(CountedRequest(request.scope, request.receive))

            return handle_counted

    return CountingRoute
