"""Sends the answer to an API request, whole or as a stream, while the client is there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from fastapi import Response
from starlette.types import Receive, Scope, Send

from .async_engine import ApiRequest
from .engine_client import CompletionDelta
from .errors import ApiError
from .response_bodies import LAST_EVENT, ResponseBodies, event

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class ApiResponse(Response):
    """The answer to an API request, which is closed when it is sent or the client goes away.

    Args:
        tokenizing: where the tokenizer may be used.
    """

    def __init__(
        self, request: ApiRequest, bodies: ResponseBodies, is_stream: bool, tokenizing: Executor
    ) -> None:
        self._request = request
        self._bodies = bodies
        self._is_stream = is_stream
        self._tokenizing = tokenizing
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it; the first of the two to end ends the other."""
        answering = asyncio.ensure_future(self._answer(scope, receive, send))
        leaving = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            answering.cancel()
            leaving.cancel()
            self._request.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            deltas = await self._request.deltas()  # the status is known with the first ones
            if not self._is_stream:
                body = await self._whole(await self._rest(deltas))
                response = Response(body, media_type="application/json")
        except ApiError as error:
            response = error.response()
        else:
            if self._is_stream:
                await self._stream(deltas, send)
                return
        await response(scope, receive, send)

    async def _whole(self, deltas: list[CompletionDelta]) -> bytes:
        pieces, body = self._bodies.whole(deltas), []
        while piece := await self._make(next, pieces, b""):  # others have their turn in between
            body.append(piece)
        return b"".join(body)

    async def _make(self, make: Callable[..., bytes], *args: Any) -> bytes:
        if not self._bodies.has_logprobs:
            return make(*args)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, make, *args)

    async def _rest(self, deltas: list[CompletionDelta]) -> list[CompletionDelta]:
        whole = {delta.index: delta for delta in deltas}
        while deltas := await self._request.deltas():
            for delta in deltas:
                if delta.index in whole:
                    whole[delta.index].extend(delta)
                else:
                    whole[delta.index] = delta
        return list(whole.values())

    async def _stream(self, deltas: list[CompletionDelta], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            while deltas:
                if body := await self._make(self._bodies.events, deltas):
                    await _send_part(send, body)
                deltas = await self._request.deltas()
            end = (self._bodies.usage_event() if self._bodies.wants_usage else b"") + LAST_EVENT
        except ApiError as error:  # too late for a status
            end = event(error.body())
        await _send_part(send, end, is_last=True)


async def _send_part(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
