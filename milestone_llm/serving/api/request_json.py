"""JSON of requests. Its values are counted before it is parsed, so that parsing has a bounded cost.

Texts are valid Unicode and numbers are finite: half of a surrogate pair, NaN, 1e999 and numbers of
thousands of digits are rejected, in every field. So is an object that has a name twice: parsers
differ in which of the two values they take.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic_core import from_json

from milestone_llm.core.errors import InputError
from milestone_llm.structured.params import unique_names

from .errors import ApiError


def counting_route(max_parts: int, max_values: int) -> type[APIRoute]:
    """Return a class of FastAPI routes that count a body's values before they parse it.

    Args:
        max_parts: most texts (names of fields too), lists and objects in a body.
        max_values: most values in lists and objects; most of these are numbers.
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
    # An escaped quote ends no text. Without escapes, every second part between quotes is structure.
    body_of_marks = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_parts = body_of_marks.count(b'"') // 2
    if num_parts <= max_parts:
        structure = b"".join(body_of_marks.split(b'"')[::2])
        num_parts += structure.count(b"[") + structure.count(b"{")
        _check("values", structure.count(b",") + 1, max_values)
    _check("lists, objects and texts", num_parts, max_parts)
    try:
        value = from_json(body, allow_inf_nan=False)
        json.loads(body, object_pairs_hook=unique_names, parse_float=_check_finite)
        return value
    except InputError as error:
        raise ApiError(400, f"the body: {error}") from None
    except ValueError as error:
        text = "the body is no valid JSON (UTF-8 text, no NaN, no half of a surrogate pair)"
        raise ApiError(400, f"{text}: {error}") from None


def _check_finite(number: str) -> None:
    """Refuse a number, as it is written, that a float of 64 bits does not hold."""
    if math.isinf(float(number)):
        raise InputError(f"the number {number:.50} is too large")


def _check(what: str, count: int, limit: int) -> None:
    if count > limit:
        text = f"the body has {count:,} {what}, and a request to this model may have at most "
        raise ApiError(400, f"{text}{limit:,}")
