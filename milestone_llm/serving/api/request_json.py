"""JSON of requests, counted before it is parsed: no body costs more than it could be for.

What is parsed is text, all of it: half of a surrogate pair, NaN and numbers of thousands of digits
are no JSON here, wherever they stand.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from .errors import ApiError


def counting_route(max_parts: int, max_values: int) -> type[APIRoute]:
    """The class of FastAPI's routes whose bodies are counted before they are parsed.

    Args:
        max_parts: texts (names of fields, too), lists and objects, whatever a field is called.
        max_values: values in lists and objects, numbers above all.
    """

    class CountedRequest(Request):
        async def json(self) -> Any:
            return _parse(await self.body(), max_parts, max_values)

    class CountingRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def handle_counted(request: Request) -> Response:
                return await handle(CountedRequest(request.scope, request.receive))

            return handle_counted

    return CountingRoute


def _parse(body: bytes, max_parts: int, max_values: int) -> Any:
    # What escapes ends no text; without it, every second part between quotes is structure.
    body_of_marks = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_parts = body_of_marks.count(b'"') // 2
    if num_parts <= max_parts:
        structure = b"".join(body_of_marks.split(b'"')[::2])
        num_parts += structure.count(b"[") + structure.count(b"{")
        _check("values", structure.count(b",") + 1, max_values)
    _check("lists, objects and texts", num_parts, max_parts)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        text = "the body is no valid JSON (UTF-8 text, no NaN, no half of a surrogate pair)"
        raise ApiError(400, f"{text}: {error}") from None


def _check(what: str, count: int, limit: int) -> None:
    if count > limit:
        text = f"the body has {count:,} {what}, and a request to this model may have at most "
        raise ApiError(400, f"{text}{limit:,}")
