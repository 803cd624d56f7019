"""Send the answer to an API request, whole or as a stream, while the client is connected."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import chain
from typing import Any, Protocol

from fastapi import Response
from starlette.types import Receive, Scope, Send

from milestone_llm.frontend.outputs import RequestOutput

from .async_engine import ApiRequest
from .errors import ApiError

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
]


class Bodies(Protocol):
    """Writes an answer in the format of one of OpenAI's APIs."""

    @property
    def has_logprobs(self) -> bool:
        """Whether log-probabilities were requested."""

    def whole(self, outputs: Sequence[RequestOutput]) -> Iterator[bytes]:
        """Yield a whole answer (not a stream) in parts."""

    def events(self, outputs: Sequence[RequestOutput]) -> bytes:
        """Return the next events of a stream."""

    def last_events(self) -> bytes:
        """Return what ends a stream."""

    def error_event(self, error: ApiError) -> bytes:
        """Return the event of an error within a stream, its last."""


class ApiResponse(Response):
    """The answer to an API request. The request is closed when it is sent, or when the client
    leaves.

    Args:
        tokenizing: executor in which the tokenizer may be used.
    """

    def __init__(
        self, request: ApiRequest, bodies: Bodies, is_stream: bool, tokenizing: Executor
    ) -> None:
        self._request = request
        self._bodies = bodies
        self._is_stream = is_stream
        self._tokenizing = tokenizing
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer, until it is complete or the client has left."""
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
            outputs = await self._request.outputs()  # the status is known with the first ones
        except ApiError as error:
            response: Response = error.response()
        else:
            if self._is_stream:
                await self._stream(outputs, send)
                return
            response = Response(await self._whole(), media_type="application/json")
        await response(scope, receive, send)

    async def _whole(self) -> bytes:
        snapshots = [state.snapshot() for state in self._request.states]
        _read_texts(snapshots)
        pieces, body = self._bodies.whole(snapshots), []
        while piece := await self._make(next, pieces, b""):  # other requests get their turn
            body.append(piece)
        return b"".join(body)

    async def _make(self, make: Callable[..., bytes], *args: Any) -> bytes:
        if not self._bodies.has_logprobs:
            return make(*args)
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, make, *args)

    async def _stream(self, outputs: list[RequestOutput], send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            while outputs:
                _read_texts(outputs)
                if body := await self._make(self._bodies.events, outputs):
                    await _send_part(send, body)
                outputs = await self._request.outputs()
            end = self._bodies.last_events()
        except ApiError as error:  # too late for a status
            end = self._bodies.error_event(error)
        await _send_part(send, end, is_last=True)


def _read_texts(outputs: list[RequestOutput]) -> None:
    """Decode the texts in this thread: it has the tokenizer that `OutputProcessor` uses."""
    for completion in chain.from_iterable(output.outputs for output in outputs):
        assert completion.text is not None


async def _send_part(send: Send, body: bytes, is_last: bool = False) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
