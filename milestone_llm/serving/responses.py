"""Sends the answer to a call, whole or as a stream, for as long as the client is there."""

from __future__ import annotations

import asyncio

from fastapi import Response
from fastapi.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .desk import Call
from .engine_client import Piece
from .errors import ApiError
from .replies import LAST_EVENT, Replies, event

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class Answer(Response):
    """The answer to a call. When the client goes away, the call is closed."""

    def __init__(self, call: Call, replies: Replies, is_stream: bool) -> None:
        self._call = call
        self._replies = replies
        self._is_stream = is_stream
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
            self._call.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            pieces = await self._call.pieces()  # the status is known with the first news
            if not self._is_stream:
                response = JSONResponse(self._replies.whole(await self._rest(pieces)))
        except ApiError as error:
            response = error.response()
        else:
            if self._is_stream:
                await self._stream(pieces, send)
                return
        await response(scope, receive, send)

    async def _rest(self, pieces: list[Piece]) -> list[Piece]:
        whole = {piece.index: piece for piece in pieces}
        while pieces := await self._call.pieces():
            for piece in pieces:
                if piece.index in whole:
                    whole[piece.index].extend(piece)
                else:
                    whole[piece.index] = piece
        return list(whole.values())

    async def _stream(self, pieces: list[Piece], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            while pieces:
                body = self._replies.events(pieces)
                if body:
                    await _send_part(send, body)
                pieces = await self._call.pieces()
            end = (self._replies.usage_event() if self._replies.wants_usage else b"") + LAST_EVENT
        except ApiError as error:  # too late for a status
            end = event(error.body())
        await _send_part(send, end, is_last=True)


async def _send_part(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
