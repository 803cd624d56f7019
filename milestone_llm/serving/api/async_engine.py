"""The engine as HTTP uses it: admit requests, give each its tokens, and end them.

The engine's process sends tokens. Here the frontend's `OutputProcessor` turns them into text and
looks for stop strings. When a stop string has ended a completion, the engine is told. That is why
tokens, waiting times and ends are counted here. Everything runs in HTTP's thread, except
`AsyncEngine.deliver`.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.frontend.output_processor import OutputProcessor, OutputQueue, RequestState
from milestone_llm.frontend.outputs import RequestOutput

from ..engine.client import EngineClient, EngineCoreOutputs, EngineRequest
from .errors import ApiError, deadline_passed, field_named_first
from .metrics import EngineMetrics, Metrics

MAX_MESSAGES = 64
"""Steps whose tokens may wait for HTTP's thread."""
LOOK_SECONDS = 0.1
"""Seconds between two checks that HTTP still runs, while such steps wait."""


class ApiRequest:
    """One HTTP request: its requests to the engine, and the outputs that have arrived.

    The code that opens an API request has to close it, also after an error.
    """

    def __init__(self, engine: AsyncEngine, num_choices: int, key_salt: str) -> None:
        self._engine = engine
        self.num_choices = num_choices
        self.key_salt = key_salt
        """Salt of the client's key."""
        self.states: list[RequestState] = []
        """States of its requests to the engine, in order."""
        self.arrival_time = 0.0
        """When the client asked, in seconds of `time.perf_counter()`."""
        self.is_refused = False
        """Whether the engine has rejected one of its requests."""
        self.rule_param = ""
        self.queue = OutputQueue()
        self._error: ApiError | None = None
        self._has_changed = asyncio.Event()
        self._deadline: asyncio.TimerHandle | None = None

    def start(
        self,
        requests: Sequence[EngineRequest],
        is_stream: bool,
        deadline: float | None,
        rule_param: str = "structured_outputs",
    ) -> None:
        """Pass the requests to the engine.

        Args:
            is_stream: whether each new output is wanted, or only the whole at the end.
            deadline: seconds after their arrival; if it passes, the answer is an error.
            rule_param: field of the body that has the rule of the output, if there is one.
        """
        self.rule_param = rule_param
        self.queue = OutputQueue(wants_all=is_stream)
        self.arrival_time = requests[0].arrival_time
        if deadline is not None:
            left = self.arrival_time + deadline - time.perf_counter()
            loop = asyncio.get_running_loop()
            error = deadline_passed(deadline)
            self._deadline = loop.call_later(max(0.0, left), self.fail, error)
        self.states = self._engine.add(self, requests)

    async def outputs(self) -> list[RequestOutput]:
        """Wait for tokens.

        Returns:
            The newest output of each request that grew; empty when all outputs have been returned.

        Raises:
            ApiError: the request has failed.
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
        """Wake up `outputs` after new tokens have been put into the queue."""
        if self.queue or self.is_finished:
            self._has_changed.set()

    def fail(self, error: ApiError) -> None:
        """Answer with an error after the outputs that are there. Only the first error counts."""
        self._error = self._error or error
        self._has_changed.set()

    def close(self) -> None:
        """Abort the unfinished requests, and stop tracking this API request."""
        if self._deadline is not None:
            self._deadline.cancel()
        self._engine.close_request(self)

    @property
    def is_finished(self) -> bool:
        """Whether no more outputs will come from the engine."""
        return not self.queue.unfinished


@dataclass(slots=True)
class Followed:
    """A completion that the engine may still send tokens for."""

    owner: ApiRequest
    state: RequestState
    """State of its request."""
    last_time: float = 0.0
    """When the step ended that computed its newest token, in seconds of `time.perf_counter()`."""


class AsyncEngine:
    """Admits API requests, and gives each the tokens that the engine computes for it.

    Args:
        max_choices: most completions at one time, running or waiting.
        num_keys: number of API keys, which share them.
    """

    def __init__(
        self, client: EngineClient, metrics: Metrics, max_choices: int, num_keys: int = 1
    ) -> None:
        self.client = client
        self.metrics = metrics
        self.max_choices = max_choices
        self._share = max(1, max_choices // max(1, num_keys))
        """Completions for each key. One that has more leaves so many places free for others."""
        self._most_at_once = max(self._share, max_choices - self._share * (num_keys > 1))
        self.closed_because: str | None = None
        """Why no more requests are admitted; None while they are."""
        self._open: dict[ApiRequest, None] = {}
        self._choices_of = Counter[str]()
        """Completions in `_open` of each API key, by the salt of the key."""
        self._followed: dict[str, Followed] = {}
        """Tracked completions, by their ids."""
        self._requests: dict[str, ApiRequest] = {}
        """API requests, by the ids of their requests to the engine."""
        self._output_processor = OutputProcessor(copy.deepcopy(client.info.tokenizer))
        self._messages: deque[EngineCoreOutputs] = deque()
        """Messages of the engine that HTTP's thread has not read yet."""
        self._is_to_take = False
        """Whether `_take_messages` has been scheduled in HTTP's thread and has not begun."""
        self._has_taken = threading.Event()

    # -- requests come and go ----------------------------------------------------------------

    def check_room(self, num_choices: int = 1, key_salt: str = "") -> None:
        """Reject a request that there is no room for, before its body is read or its text
        tokenized.

        Args:
            key_salt: salt of the client's key.

        Raises:
            ApiError: 503 when no requests are admitted or the engine does not respond, 400 when it
                asks for more completions than fit at all, 429 when it would fit later.
        """
        if problem := self.closed_because or self.client.problem:
            headers = {"Retry-After": "1"}
            raise ApiError(503, f"not serving: {problem}", headers=headers)
        if num_choices > self._most_at_once:
            text = f"{num_choices} completions are asked for, and the server takes at most "
            raise ApiError(400, f"{text}{self._most_at_once} at a time")
        num_own = self._choices_of[key_salt]
        is_within_share = num_own + num_choices <= self._share
        most = self.max_choices if is_within_share else self._most_at_once
        num_open = self._choices_of.total()
        if num_open + num_choices > most:
            self.metrics.refused.inc()
            text = f"{num_open} completions are running or waiting; the server takes "
            text += f"{self.max_choices} at a time"
            if most < self.max_choices:
                text += f", and keeps {self._share} for other keys ({num_own} are of this one)"
            code, headers = "rate_limit_exceeded", {"Retry-After": "1"}
            raise ApiError(429, f"{text}. Try again later.", code=code, headers=headers)

    def open_request(self, num_choices: int, key_salt: str = "") -> ApiRequest:
        """Admit an API request for `num_choices` completions.

        Raises:
            ApiError: as `check_room`.
        """
        self.check_room(num_choices, key_salt)
        request = ApiRequest(self, num_choices, key_salt)
        self._open[request] = None
        self._choices_of[key_salt] += num_choices
        return request

    @property
    def num_open(self) -> int:
        """Number of API requests that wait for an answer, or for more of it."""
        return len(self._open)

    def add(self, owner: ApiRequest, requests: Sequence[EngineRequest]) -> list[RequestState]:
        """Pass the requests of an API request to the engine, and track their completions."""
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
        """End an API request. The engine drops those of its completions that are not finished."""
        if request not in self._open:
            return
        del self._open[request]
        self._choices_of[request.key_salt] -= request.num_choices
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

    def deliver(self, event_loop: asyncio.AbstractEventLoop, message: EngineCoreOutputs) -> None:
        """Queue a step's outputs for HTTP's thread. Called in the thread of `EngineClient.run`.

        While HTTP's thread is busy, messages wait, and then it takes all of them at once: one event
        of a stream may have the tokens of several steps. When `MAX_MESSAGES` wait, this thread
        waits too, and so does the engine: there are never more.

        Args:
            event_loop: HTTP's.
        """
        self._messages.append(message)
        if not self._is_to_take:  # once: other callbacks need their turn
            self._is_to_take = True
            with contextlib.suppress(RuntimeError):  # HTTP has ended
                event_loop.call_soon_threadsafe(self._take_messages)
        is_https = asyncio._get_running_loop() is event_loop  # must not wait for itself
        while len(self._messages) >= MAX_MESSAGES and event_loop.is_running() and not is_https:
            self._has_taken.wait(LOOK_SECONDS)
            self._has_taken.clear()

    def _take_messages(self) -> None:
        self._is_to_take = False  # before messages are counted: later ones schedule again
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
                if output.failed_rule is not None:
                    param = followed.owner.rule_param
                    text = f"{param} failed amid the output: {output.failed_rule}"
                    if output.failed_rule.startswith(("allowed_token_ids", "bad_words")):
                        text = output.failed_rule
                        param = field_named_first(text)
                    followed.owner.fail(ApiError(400, text, param=param))
                elif output.finish_reason == "error":
                    error = ApiError(500, "the step that computed this request failed")
                    followed.owner.fail(error)
        ended = self._process(outputs)
        for completion_id, reason in ended.items():
            if reason == "error":  # if it is not the engine's, the detokenizer failed
                owner = self._followed[completion_id].owner
                owner.fail(ApiError(500, "its text could not be made"))
        for output in outputs:
            if output.finish_reason is not None:  # the engine knows that it has ended
                ended.pop(output.request_id, None)
        for completion_id in ended:
            del self._followed[completion_id]  # tokens that are still on their way are dropped
            self.client.end_completion(completion_id)
        for owner in owners:
            owner.note_tokens()

    def _process(self, outputs: Sequence[EngineCoreOutput]) -> dict[str, str]:
        """Update the states of requests. Count their tokens, and the requests that have ended.

        Returns:
            Finish reasons of the completions that have ended, by id.
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
        """Admit no more requests. Only the first reason counts."""
        self.closed_because = self.closed_because or reason

    def fail_all(self, message: str) -> None:
        """Answer all open requests with an error."""
        for request in self._open:
            request.fail(ApiError(503, message))

    async def wait_until_empty(self, seconds: float) -> None:
        """Wait until all open requests have been answered, at most `seconds`."""
        end = time.perf_counter() + seconds
        while self._open and time.perf_counter() < end:
            await asyncio.sleep(0.02)


def _count(
    output: EngineCoreOutput, followed: Followed, counting: EngineMetrics, step_time: float
) -> None:
    """Record the latencies of a completion's new tokens: the first token's, or those between
    tokens."""
    if not (num_tokens := len(output.new_token_ids)):
        return
    state = followed.state
    if followed.last_time:
        counting.itl.observe(step_time - followed.last_time)
    elif output.request_id == state.request_id:  # forks: theirs came with this one
        num_prompt_tokens, arrival_time = len(state.prompt_token_ids), followed.owner.arrival_time
        counting.note_first_token(num_prompt_tokens, arrival_time, step_time, output.facts)
    for _ in range(num_tokens - 1):
        counting.itl.observe(0.0)
    followed.last_time = step_time
