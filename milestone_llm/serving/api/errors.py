"""Errors as OpenAI's clients expect them: a status and `{"error": {...}}`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

_TYPES = {
    401: "authentication_error",
    429: "rate_limit_error",
    504: "timeout_error",
}
_KINDS = {
    "prompt": "text, token ids, or a list of texts or of lists of token ids",
    "stop": "text or a list of texts",
    "tool_choice": '"none", "auto", "required", {"type": "function", "function": {"name": "..."}} '
    "or allowed_tools",
    "content": 'text or a list of parts like {"type": "text", "text": "..."}',
}
"""Fields that may have several types: what each may be."""
MAX_CHARACTERS = 500
"""Longest message. It may quote what a client sent, which may be megabytes."""


def field_named_first(message: str) -> str:
    """Return the field with which a message of the engine begins: "top_k must", "seed=5"."""
    return re.split(r"[\s=:]", message, maxsplit=1)[0]


class ApiError(HTTPException):
    """An error that is sent to the client as the answer.

    Args:
        param: the field of the request that is to blame.
    """

    def __init__(
        self,
        status_code: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        if len(message) > MAX_CHARACTERS:
            message = f"{message[:MAX_CHARACTERS]}..."
        super().__init__(status_code, message, headers)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """Return the JSON of the answer. In a stream, it is the data of the last event."""
        default = "invalid_request_error" if self.status_code < 500 else "server_error"
        kind = _TYPES.get(self.status_code, default)
        error = {"message": self.detail, "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """Return the answer."""
        return JSONResponse(self.body(), self.status_code, self.headers)


def deadline_passed(seconds: float | None) -> ApiError:
    """Return the error for an answer that its client no longer needs."""
    return ApiError(504, f"the deadline of {seconds} s has passed")


async def answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answer our own errors, and those of the framework (404, no JSON). For FastAPI."""
    assert isinstance(error, HTTPException)
    if error.status_code == 404 and not isinstance(error, ApiError):
        known = [each.path for each in request.app.routes if each.include_in_schema]
        text = f"there is no path {request.url.path[:100]!r}; there are {', '.join(known)}"
        error = ApiError(404, text)
    if not isinstance(error, ApiError):
        error = ApiError(error.status_code, str(error.detail), headers=dict(error.headers or {}))
    return error.response()


async def answer_bad_fields(request: Request, error: Exception) -> JSONResponse:
    """Answer a body that does not fit the protocol: name the first wrong field. For FastAPI."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is no valid JSON: {first['ctx']['error']}").response()
    path, message = wrong_field(first["loc"][1:], first)  # after "body"
    if not path:
        return ApiError(400, f"the body: {message} (is Content-Type application/json?)").response()
    return ApiError(400, f"{'.'.join(path)}: {message}", param=path[0]).response()


def wrong_field(place: Sequence[Any], error: Mapping[str, Any]) -> tuple[list[str], str]:
    """Return where a wrong field is and what is wrong with it. For a field of several types,
    Pydantic reports what is wrong for each of them."""
    path = [str(part) for part in place]
    several = [at for at, name in enumerate(path) if name in _KINDS]
    if several and error["type"] != "missing":
        path = path[: several[0] + 1]
        return path, f"it must be {_KINDS[path[-1]]}"
    return path, error["msg"].removeprefix("Value error, ")


async def answer_bug(request: Request, error: Exception) -> JSONResponse:
    """Answer every other exception; the server's log has the traceback. For FastAPI."""
    return ApiError(500, f"the server failed: {type(error).__name__}").response()
