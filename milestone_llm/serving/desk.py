"""Between HTTP and the engine: which requests are let in, which client gets which tokens, and the
end.

Everything here runs in HTTP's thread, but for `Desk.deliver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence

from milestone_llm.frontend.outputs import Logprob

from .engine_client import EngineClient, EngineRequest, Piece, Progress
from .errors import ApiError
from .metrics import Metrics

PACE = 10.0
"""Tokens are handed out at most once in so many times the CPU time that it took to send the last
ones: every step where few are streaming, several tokens in one frame where hundreds are. What HTTP
takes, the engine may lack: the interpreter where both are in one process, a core where there are
few."""
MAX_PAUSE = 0.25
"""Seconds between two times at most: where each token costs much, waiting makes none cheaper."""


class Call:
    """One HTTP request: its requests to the engine, and their outputs.

    A choice is a completion, numbered over all prompts as in the answer. The code that opens a call
    has to close it, whatever happens.
    """

    def __init__(self, desk: Desk, num_choices: int) -> None:
        self._desk = desk
        self.num_choices = num_choices
        self.requests: list[EngineRequest] = []
        self.num_cached_tokens: list[int] = []
        """Of each request: prompt tokens found in the prefix cache."""
        self.prompt_logprobs: list[list[dict[int, Logprob] | None] | None] = []
        self._places: dict[str, int] = {}
        self._pieces: dict[int, Piece] = {}
        self._num_unfinished = num_choices
        self._error: ApiError | None = None
        self._news = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def submit(self, requests: Sequence[EngineRequest], deadline: float | None) -> None:
        """Hand the requests to the engine.

        Args:
            deadline: seconds from their arrival; later, an error is the answer.
        """
        self.requests = list(requests)
        self._places = {each.request_id: place for place, each in enumerate(requests)}
        self.num_cached_tokens = [0] * len(requests)
        self.prompt_logprobs = [None] * len(requests)
        if deadline is not None:
            left = requests[0].arrival_time + deadline - time.perf_counter()
            error = ApiError(504, f"the deadline of {deadline} s has passed")
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(max(0.0, left), self.fail, error)
        self._desk.submit(self)

    async def pieces(self) -> list[Piece]:
        """Wait for news: a piece for each choice that grew. An empty list: all is there.

        Raises:
            ApiError: there will be no answer.
        """
        while not self._pieces:
            if self._error is not None:
                raise self._error
            if self.is_whole:
                return []
            self._news.clear()
            await self._news.wait()
        pieces, self._pieces = self._pieces, {}
        return list(pieces.values())

    def take(self, progress: Progress) -> None:
        """Take in news of one of the requests."""
        place = self._places[progress.request_id]
        if progress.refusal is not None:
            self.fail(ApiError(progress.status, progress.refusal))
        self.num_cached_tokens[place] = progress.num_cached_tokens
        if progress.prompt_logprobs is not None:
            self.prompt_logprobs[place] = progress.prompt_logprobs
        for piece in progress.pieces:
            piece.index += place * (self.num_choices // len(self.requests))
            self._num_unfinished -= piece.finish_reason is not None
            if piece.finish_reason == "error":
                self.fail(ApiError(500, "the step that computed this request failed"))
            elif piece.index in self._pieces:  # the client is late, or this thread
                self._pieces[piece.index].extend(piece)
            else:
                self._pieces[piece.index] = piece
        self._news.set()

    def fail(self, error: ApiError) -> None:
        """Answer with an error, once what is there has been passed on. The first one counts."""
        self._error = self._error or error
        self._news.set()

    def close(self) -> None:
        """The client has gone: unfinished requests are aborted."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._desk.forget(self)

    @property
    def is_whole(self) -> bool:
        """Whether the engine has nothing more to bring."""
        return not self._num_unfinished


class Desk:
    """Lets requests in and hands out their tokens.

    Args:
        max_choices: most completions, running or waiting, at one time.
    """

    def __init__(self, engine: EngineClient, metrics: Metrics, max_choices: int) -> None:
        self.engine = engine
        self.metrics = metrics
        self.max_choices = max_choices
        self.event_loop: asyncio.AbstractEventLoop
        self.closed_because: str | None = None
        """Why nobody is let in any more; None while all may come."""
        self._calls: dict[Call, None] = {}
        self._call_of: dict[str, Call] = {}
        self._num_choices = 0
        self._lock = threading.Lock()  # for the next two
        self._delivered: list[Progress] = []
        self._is_awake = False

    @property
    def num_calls(self) -> int:
        """How many HTTP requests wait for an answer, or for more of it."""
        return len(self._calls)

    # -- letting in --------------------------------------------------------------------------

    def check(self, num_choices: int = 1) -> None:
        """Refuse what there is no room for, before its body is read or its text tokenized.

        Raises:
            ApiError: 503 when nobody is let in, 429 when too many are inside.
        """
        if self.closed_because is not None:
            headers = {"Retry-After": "1"}
            raise ApiError(503, f"not serving: {self.closed_because}", headers=headers)
        if num_choices > self.max_choices:
            text = f"{num_choices} completions are asked for, and the server takes at most "
            raise ApiError(400, f"{text}{self.max_choices} at a time")
        if self._num_choices + num_choices > self.max_choices:
            self.metrics.refused["max_queued"] += 1
            text = f"{self._num_choices} completions are running or waiting; the server takes "
            text += f"{self.max_choices} at a time. Try again later."
            code, headers = "rate_limit_exceeded", {"Retry-After": "1"}
            raise ApiError(429, text, code=code, headers=headers)

    def open_call(self, num_choices: int) -> Call:
        """Let a request for so many completions in.

        Raises:
            ApiError: as `check`.
        """
        self.check(num_choices)
        call = Call(self, num_choices)
        self._calls[call] = None
        self._num_choices += num_choices
        return call

    def submit(self, call: Call) -> None:
        """Pass a call's requests to the engine."""
        for request in call.requests:
            self._call_of[request.request_id] = call
        self.engine.submit(call.requests)

    def forget(self, call: Call) -> None:
        """A call is over; the engine drops what it has not finished of it."""
        if call not in self._calls:
            return
        del self._calls[call]
        self._num_choices -= call.num_choices
        for request in call.requests:
            del self._call_of[request.request_id]
            if not call.is_whole:
                self.engine.abort(request.request_id)

    # -- handing out -------------------------------------------------------------------------

    def deliver(self, batch: list[Progress]) -> None:
        """Take what steps brought. Called in the main thread; wakes HTTP's once, if at all."""
        with self._lock:
            self._delivered += batch
            is_asleep, self._is_awake = not self._is_awake, True
        if is_asleep:
            with contextlib.suppress(RuntimeError):  # HTTP has ended
                self.event_loop.call_soon_threadsafe(self._hand_out)

    def _hand_out(self) -> None:
        start = time.thread_time()
        with self._lock:
            delivered, self._delivered = self._delivered, []
            self._is_awake = False
        for progress in delivered:
            call = self._call_of.get(progress.request_id)
            if call is not None:
                call.take(progress)
        self.event_loop.call_soon(self._rest, start)  # comes after those who were woken

    def _rest(self, start: float) -> None:
        spent = time.thread_time() - start
        self.event_loop.call_later(min(MAX_PAUSE, (PACE - 1) * spent), self.engine.want_more)

    # -- closing -----------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Let no more requests in. The first reason counts."""
        self.closed_because = self.closed_because or reason

    def fail_all(self, message: str) -> None:
        """Answer everybody who waits with an error."""
        for call in self._calls:
            call.fail(ApiError(503, message))

    async def wait_until_empty(self, seconds: float) -> None:
        """Wait until everybody has been answered, but not longer than this."""
        end = time.perf_counter() + seconds
        while self._calls and time.perf_counter() < end:
            await asyncio.sleep(0.02)
