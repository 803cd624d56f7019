"""The engine as HTTP uses it: which requests are let in, which gets which tokens, and the end.

The engine's process sends tokens. Here they become text, and stop strings are found in it, by the
frontend's `OutputProcessor`; the engine is told of a completion that one has ended. So it is here
that tokens, waits and ends are counted. Everything runs in HTTP's thread, except
`AsyncEngine.deliver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.frontend.output_processor import OutputProcessor, RequestState
from milestone_llm.frontend.output_queue import OutputQueue
from milestone_llm.frontend.outputs import RequestOutput

from ..engine.client import EngineClient, EngineCoreOutputs, EngineRequest
from .errors import ApiError
from .metrics import EngineMetrics, Metrics

MAX_MESSAGES = 64
"""Steps whose tokens may wait for HTTP's thread."""
LOOK_SECONDS = 0.1
"""How often it is looked whether HTTP still runs, while they do."""


class ApiRequest:
    """One HTTP request: its requests to the engine, and what they have brought.

    The code that opens an API request has to close it, whatever happens.
    """

    def __init__(self, engine: AsyncEngine, num_choices: int) -> None:
        self._engine = engine
        self.num_choices = num_choices
        self.states: list[RequestState] = []
        """Of the requests to the engine, in order."""
        self.arrival_time = 0.0
        """When the client asked, in seconds of `time.perf_counter()`."""
        self.is_refused = False
        """Whether the engine has refused one of them."""
        self.queue = OutputQueue()
        self._error: ApiError | None = None
        self._has_changed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def start(
        self, requests: Sequence[EngineRequest], is_stream: bool, deadline: float | None
    ) -> None:
        """Pass the requests to the engine.

        Args:
            is_stream: whether outputs are wanted as they grow, or whole.
            deadline: seconds from their arrival; later, an error is the answer.
        """
        self.queue = OutputQueue(wants_all=is_stream)
        self.arrival_time = requests[0].arrival_time
        if deadline is not None:
            left = self.arrival_time + deadline - time.perf_counter()
            error = ApiError(504, f"the deadline of {deadline} s has passed")
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(max(0.0, left), self.fail, error)
        self.states = self._engine.add(self, requests)

    async def outputs(self) -> list[RequestOutput]:
        """Wait for tokens.

        Returns:
            The newest output of each request that grew; nothing once all is there.

        Raises:
            ApiError: there will be no answer.
        """
        while not (outputs := self.queue.take()):
            if self._error is not None:
                raise self._error
            if self.is_finished:
                break
            self._has_changed.clear()
            await self._has_changed.wait()
        return outputs

    def note_tokens(self) -> None:
        """There are tokens."""
        if self.queue or self.is_finished:
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
        return not self.queue.unfinished


@dataclass(slots=True)
class Followed:
    """A completion of which the engine may have more to say."""

    owner: ApiRequest
    state: RequestState
    """Of its request."""
    last_time: float = 0.0
    """When the step ended that brought its newest token."""


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
        """Why no request is let in any more; None while all may come."""
        self._open: dict[ApiRequest, None] = {}
        self._num_choices = 0
        """Completions of these."""
        self._followed: dict[str, Followed] = {}
        """By the id of a completion."""
        self._requests: dict[str, ApiRequest] = {}
        """By the id of a request to the engine."""
        self._output_processor = OutputProcessor(copy.deepcopy(client.info.tokenizer))
        self._messages: deque[EngineCoreOutputs] = deque()
        """From the engine, and not looked at."""
        self._is_to_take = False
        """Whether HTTP's thread has been told of some of them."""
        self._has_taken = threading.Event()

    # -- requests come and go ----------------------------------------------------------------

    def check_room(self, num_choices: int = 1) -> None:
        """Refuse what there is no room for, before its body is read or its text tokenized.

        Raises:
            ApiError: 503 when no request is let in or the engine stands still, 429 when too many
                are inside.
        """
        if problem := self.closed_because or self.client.problem:
            headers = {"Retry-After": "1"}
            raise ApiError(503, f"not serving: {problem}", headers=headers)
        if num_choices > self.max_choices:
            text = f"{num_choices} completions are asked for, and the server takes at most "
            raise ApiError(400, f"{text}{self.max_choices} at a time")
        if self._num_choices + num_choices > self.max_choices:
            self.metrics.refused.inc()
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

    @property
    def num_open(self) -> int:
        """API requests that wait for an answer, or for more of it."""
        return len(self._open)

    def add(self, owner: ApiRequest, requests: Sequence[EngineRequest]) -> list[RequestState]:
        """Pass the requests of an API request to the engine, and follow them."""
        states = []
        for each in requests:
            state = self._output_processor.add(
                each.completion_ids, each.prompt_token_ids, each.params, owner.queue
            )
            self._followed |= {name: Followed(owner, state) for name in each.completion_ids}
            self._requests[each.request_id] = owner
            states.append(state)
        self.client.add_requests(list(requests))
        return states

    def close_request(self, request: ApiRequest) -> None:
        """An API request is over; the engine drops what it has not finished of it."""
        if request not in self._open:
            return
        del self._open[request]
        self._num_choices -= request.num_choices
        reason = "error" if request.is_refused else "abort"
        for state in request.states:
            unfinished = [each for each in state.completions if each.finish_reason is None]
            self._process(
                [EngineCoreOutput(each.completion_id, finish_reason=reason) for each in unfinished]
            )
            del self._requests[state.request_id]
            for completion in state.completions:
                self._followed.pop(completion.completion_id, None)
            if unfinished:
                self.client.abort(state.request_id)

    # -- tokens ------------------------------------------------------------------------------

    def deliver(self, message: EngineCoreOutputs) -> None:
        """Take what a step brought. Called in the thread of `EngineClient.run`.

        While HTTP's thread is busy, messages wait for it, and it takes them all at once: then, an
        event has the tokens of several steps. When `MAX_MESSAGES` wait, so do this thread and the
        engine after it: what waits is never more than that.
        """
        self._messages.append(message)
        if not self._is_to_take:  # once, or others would not have their turn in between
            self._is_to_take = True
            with contextlib.suppress(RuntimeError):  # HTTP has ended
                self.event_loop.call_soon_threadsafe(self._take_messages)
        is_https = asyncio._get_running_loop() is self.event_loop  # with `--replicas`
        while len(self._messages) >= MAX_MESSAGES and self.event_loop.is_running() and not is_https:
            self._has_taken.wait(LOOK_SECONDS)
            self._has_taken.clear()

    def _take_messages(self) -> None:
        self._is_to_take = False  # before it is looked how many there are: no message is forgotten
        owners: dict[ApiRequest, None] = {}
        outputs: list[EngineCoreOutput] = []
        num_messages = len(self._messages)  # more may come as fast as they are taken
        messages = [self._messages.popleft() for _ in range(num_messages)]
        self._has_taken.set()
        for message in messages:
            for request_id, refusal in message.refusals.items():
                if (refused := self._requests.get(request_id)) is not None:
                    refused.is_refused = True
                    refused.fail(ApiError(refusal.status, refusal.text))
            if not message.is_of_steps:
                continue
            counting = self.metrics.of(message.engine)
            counting.note_steps(message.steps)
            for output in message.outputs():
                if (followed := self._followed.get(output.request_id)) is None:  # closed
                    continue
                outputs.append(output)
                owners[followed.owner] = None
                _count(output, followed, counting, message.time)
                if output.finish_reason == "error":
                    error = ApiError(500, "the step that computed this request failed")
                    followed.owner.fail(error)
        ended = self._process(outputs)
        for completion_id, reason in ended.items():
            if reason == "error":  # if it is not the engine's, text could not be made of it
                owner = self._followed[completion_id].owner
                owner.fail(ApiError(500, "its text could not be made"))
        for output in outputs:
            if output.finish_reason is not None:  # the engine knows
                ended.pop(output.request_id, None)
        for completion_id in ended:
            del self._followed[completion_id]  # what is on its way is dropped
            self.client.end_completion(completion_id)
        for owner in owners:
            owner.note_tokens()

    def _process(self, outputs: Sequence[EngineCoreOutput]) -> dict[str, str]:
        """Bring requests up to date, and count what they have got and which of them have ended.

        Returns:
            Why completions have ended, by id.
        """
        num_before = self._output_processor.num_tokens
        ended = self._output_processor.process(outputs)
        self.metrics.generation_tokens.inc(self._output_processor.num_tokens - num_before)
        changed = {each.state.request_id: each for each in map(self._followed.__getitem__, ended)}
        for each in changed.values():
            if each.state.is_done:
                self.metrics.note_end(each.state, each.owner.arrival_time)
        return ended

    # -- the end -----------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Let no more requests in. The first reason counts."""
        self.closed_because = self.closed_because or reason

    def fail_all(self, message: str) -> None:
        """Answer all who wait with an error."""
        for request in self._open:
            request.fail(ApiError(503, message))

    async def wait_until_empty(self, seconds: float) -> None:
        """Wait until all have been answered, but not longer than this."""
        end = time.perf_counter() + seconds
        while self._open and time.perf_counter() < end:
            await asyncio.sleep(0.02)


def _count(
    output: EngineCoreOutput, followed: Followed, counting: EngineMetrics, step_time: float
) -> None:
    """Count a completion's tokens of a step: how long each was waited for."""
    if not (num_tokens := len(output.new_token_ids)):
        return
    state = followed.state
    if followed.last_time:
        counting.itl.observe(step_time - followed.last_time)
    elif output.request_id == state.request_id:  # the others are forked from this one
        num_prompt_tokens, arrival_time = len(state.prompt_token_ids), followed.owner.arrival_time
        counting.note_first_token(num_prompt_tokens, arrival_time, step_time, output.facts)
    for _ in range(num_tokens - 1):
        counting.itl.observe(0.0)
    followed.last_time = step_time
