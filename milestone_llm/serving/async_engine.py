"""The engine as HTTP uses it: which requests are let in, which gets which tokens, and the end.

Everything here runs in HTTP's thread, but for `AsyncEngine.deliver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from milestone_llm.core.outputs import Logprob

from .engine_client import CompletionDelta, EngineClient, EngineRequest, RequestDelta
from .errors import ApiError
from .metrics import Metrics

PACE = 10.0
"""Tokens are passed on at most once in so many times the CPU time that it took to send the last
ones: every step where few are streaming, several tokens in one event where hundreds are. What HTTP
takes, the engine may lack: the interpreter where both are in one process, a core where there are
few."""
MAX_PAUSE = 0.25
"""Seconds between two times at most: where each token costs much, waiting makes none cheaper."""


class ApiRequest:
    """One HTTP request: its requests to the engine, and what they have brought.

    A choice is a completion, numbered over all prompts as in the answer. The code that opens an API
    request has to close it, whatever happens.
    """

    def __init__(self, engine: AsyncEngine, num_choices: int) -> None:
        self._engine = engine
        self.num_choices = num_choices
        self.requests: list[EngineRequest] = []
        self.num_cached_tokens: list[int] = []
        """Of each request: prompt tokens found in the prefix cache."""
        self.prompt_logprobs: list[list[dict[int, Logprob] | None] | None] = []
        self._index_of: dict[str, int] = {}
        self._deltas: dict[int, CompletionDelta] = {}
        self._num_unfinished = num_choices
        self._error: ApiError | None = None
        self._has_changed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def start(self, requests: Sequence[EngineRequest], deadline: float | None) -> None:
        """Pass the requests to the engine.

        Args:
            deadline: seconds from their arrival; later, an error is the answer.
        """
        self.requests = list(requests)
        self._index_of = {each.request_id: index for index, each in enumerate(requests)}
        self.num_cached_tokens = [0] * len(requests)
        self.prompt_logprobs = [None] * len(requests)
        if deadline is not None:
            left = requests[0].arrival_time + deadline - time.perf_counter()
            error = ApiError(504, f"the deadline of {deadline} s has passed")
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(max(0.0, left), self.fail, error)
        self._engine.add(self)

    async def deltas(self) -> list[CompletionDelta]:
        """Wait for tokens: a delta for each choice that grew. An empty list: all is there.

        Raises:
            ApiError: there will be no answer.
        """
        while not self._deltas:
            if self._error is not None:
                raise self._error
            if self.is_finished:
                return []
            self._has_changed.clear()
            await self._has_changed.wait()
        deltas, self._deltas = self._deltas, {}
        return list(deltas.values())

    def take(self, delta: RequestDelta) -> None:
        """Take in what one of the requests has got."""
        index = self._index_of[delta.request_id]
        if delta.refusal is not None:
            self.fail(ApiError(delta.status, delta.refusal))
        self.num_cached_tokens[index] = delta.num_cached_tokens
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs[index] = delta.prompt_logprobs
        for completion in delta.completions:
            completion.index += index * (self.num_choices // len(self.requests))
            self._num_unfinished -= completion.finish_reason is not None
            if completion.finish_reason == "error":
                self.fail(ApiError(500, "the step that computed this request failed"))
            elif completion.index in self._deltas:  # the client is late, or this thread
                self._deltas[completion.index].extend(completion)
            else:
                self._deltas[completion.index] = completion
        self._has_changed.set()

    def fail(self, error: ApiError) -> None:
        """Answer with an error, once what is there has been passed on. The first one counts."""
        self._error = self._error or error
        self._has_changed.set()

    def close(self) -> None:
        """The client has gone: unfinished requests are aborted."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._engine.close_request(self)

    @property
    def is_finished(self) -> bool:
        """Whether the engine has nothing more to bring."""
        return not self._num_unfinished


class AsyncEngine:
    """Lets API requests in, and passes each the tokens that the engine has for it.

    Args:
        max_choices: most completions, running or waiting, at one time.
    """

    def __init__(self, client: EngineClient, metrics: Metrics, max_choices: int) -> None:
        self.client = client
        self.metrics = metrics
        self.max_choices = max_choices
        self.event_loop: asyncio.AbstractEventLoop
        self.closed_because: str | None = None
        """Why nobody is let in any more; None while all may come."""
        self._open: dict[ApiRequest, None] = {}
        self._owner_of: dict[str, ApiRequest] = {}
        """By the id of an engine's request."""
        self._num_choices = 0

    @property
    def num_open(self) -> int:
        """How many API requests wait for an answer, or for more of it."""
        return len(self._open)

    # -- requests come and go ----------------------------------------------------------------

    def check_room(self, num_choices: int = 1) -> None:
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

    def open_request(self, num_choices: int) -> ApiRequest:
        """Let an API request for so many completions in.

        Raises:
            ApiError: as `check_room`.
        """
        self.check_room(num_choices)
        request = ApiRequest(self, num_choices)
        self._open[request] = None
        self._num_choices += num_choices
        return request

    def add(self, request: ApiRequest) -> None:
        """Pass the engine's requests of an API request to the engine."""
        for each in request.requests:
            self._owner_of[each.request_id] = request
        self.client.add_requests(request.requests)

    def close_request(self, request: ApiRequest) -> None:
        """An API request is over; the engine drops what it has not finished of it."""
        if request not in self._open:
            return
        del self._open[request]
        self._num_choices -= request.num_choices
        for each in request.requests:
            del self._owner_of[each.request_id]
            if not request.is_finished:
                self.client.abort(each.request_id)

    # -- tokens ------------------------------------------------------------------------------

    def deliver(self, deltas: list[RequestDelta]) -> None:
        """Take what steps brought. Called in the thread of `EngineClient.run`."""
        with contextlib.suppress(RuntimeError):  # HTTP has ended
            self.event_loop.call_soon_threadsafe(self._pass_on, deltas)

    def _pass_on(self, deltas: list[RequestDelta]) -> None:
        start = time.thread_time()
        for delta in deltas:
            owner = self._owner_of.get(delta.request_id)
            if owner is not None:
                owner.take(delta)
        self.event_loop.call_soon(self._pause, start)  # comes after those who were woken

    def _pause(self, start: float) -> None:
        spent = time.thread_time() - start
        self.event_loop.call_later(min(MAX_PAUSE, (PACE - 1) * spent), self.client.want_more)

    # -- the end -----------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Let no more requests in. The first reason counts."""
        self.closed_because = self.closed_because or reason

    def fail_all(self, message: str) -> None:
        """Answer everybody who waits with an error."""
        for request in self._open:
            request.fail(ApiError(503, message))

    async def wait_until_empty(self, seconds: float) -> None:
        """Wait until everybody has been answered, but not longer than this."""
        end = time.perf_counter() + seconds
        while self._open and time.perf_counter() < end:
            await asyncio.sleep(0.02)
