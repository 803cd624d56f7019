"""The loop around the engine: orders in, a step, what it brought out.

    HTTP's thread                          the engine's thread (the main one)
    submit, abort, ask  -- orders -->      between two steps
    deliver(list)       <-- progress --    at most once a step, for all requests together

Only the engine's thread touches the engine, so that nobody waits for a lock while it steps.
"""

from __future__ import annotations

import concurrent.futures
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch

from milestone_llm.engine.engine import BaseEngine
from milestone_llm.engine.outputs import CompletionOutput, Logprob, RequestOutput
from milestone_llm.engine.sampling_params import SamplingParams

from .metrics import Metrics

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

MAX_FAILURES = 3
"""Steps that fail one after the other before the engine is given up."""


class EngineDeadError(RuntimeError):
    """The engine will compute nothing any more."""


@dataclass(frozen=True)
class EngineRequest:
    """A request on its way to the engine."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    is_streamed: bool = False
    """Whether each token is wanted as it comes, or all of them in the end."""
    arrival_time: float = field(default_factory=time.perf_counter)
    """When the client asked, in seconds of `time.perf_counter()`."""


@dataclass
class Piece:
    """What a completion has got since the last piece of it."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    finish_reason: str | None

    def extend(self, later: Piece) -> None:
        """Take the next piece in."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason


@dataclass
class Progress:
    """News of one request."""

    request_id: str
    pieces: list[Piece] = field(default_factory=list)
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    refusal: str | None = None
    """Why the engine did not take the request."""


class _Underway:
    """A request that the engine has: how much of each completion has been passed on."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        n = request.params.n
        self.num_characters, self.num_tokens = [0] * n, [0] * n
        self.is_ended = [False] * n
        self.num_counted = [0] * n  # tokens that the metrics know


class EngineLoop:
    """Runs an engine for others.

    Args:
        deliver: called in the engine's thread with what steps have brought, at most once a step.
        is_ready: whether it may be called. If not, what comes is kept, and goes out together.
    """

    def __init__(
        self,
        engine: BaseEngine,
        metrics: Metrics,
        deliver: Callable[[list[Progress]], None],
        is_ready: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._deliver = deliver
        self._is_ready = is_ready
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._underway: dict[str, _Underway] = {}
        self._news: dict[str, RequestOutput] = {}
        self._num_failures = 0
        self._is_stopped = False

    # -- from any thread ---------------------------------------------------------------------

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. If the engine refuses it, its progress says so."""
        self._orders.put(partial(self._add, request))

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; before the next step it has no memory any more."""
        self._orders.put(partial(self._abort, request_id))

    def ask(self, question: Callable[[], Answer]) -> concurrent.futures.Future[Answer]:
        """Have a question about the engine answered between two steps."""
        answer: concurrent.futures.Future[Answer] = concurrent.futures.Future()

        def put_question() -> None:
            if not answer.set_running_or_notify_cancel():  # nobody waits for it any more
                return
            try:
                answer.set_result(question())
            except Exception as error:
                answer.set_exception(error)

        self._orders.put(put_question)
        return answer

    def stop(self) -> None:
        """Let `run` return after the step under way."""
        self._orders.put(self._stop)

    # -- in the engine's thread --------------------------------------------------------------

    def run(self) -> None:
        """Serve until `stop`.

        Raises:
            EngineDeadError: the device failed, or `MAX_FAILURES` steps in a row did.
        """
        while not self._is_stopped:
            is_idle = not self._engine.has_unfinished_requests()
            if is_idle:  # nobody else wants the interpreter
                self._flush()
            if is_idle or not self._orders.empty():
                self._orders.get()()
            else:
                self._step()
        for request_id in list(self._underway):
            self._abort(request_id)

    def _stop(self) -> None:
        self._is_stopped = True

    def _add(self, request: EngineRequest) -> None:
        try:
            self._engine.add_request(
                request.prompt_token_ids, request.params, request.request_id, request.priority
            )
        except ValueError as error:
            self._deliver([Progress(request.request_id, refusal=str(error))])
        else:
            self._underway[request.request_id] = _Underway(request)

    def _abort(self, request_id: str) -> None:
        underway = self._underway.pop(request_id, None)
        self._news.pop(request_id, None)
        output = self._engine.abort(request_id)
        if underway is not None and output is not None:
            self._metrics.note_end(output, underway.request.arrival_time)

    def _step(self) -> None:
        counts = dict(self._engine.counts)
        start = time.perf_counter()
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._num_failures += 1
            log.exception("A step failed; the requests in it have ended")
            self._pass_on(self._engine.take_outputs())
            self._flush()
            # What a device reports once, it reports for ever.
            if isinstance(error, torch.AcceleratorError) or self._num_failures >= MAX_FAILURES:
                raise EngineDeadError(f"the engine is dead: {error!r}") from error
            return
        seconds = time.perf_counter() - start
        if self._engine.counts["steps"] > counts["steps"]:
            self._num_failures = 0
            self._metrics.note_step(seconds, counts, self._engine.counts)
        self._pass_on(outputs)

    def _pass_on(self, outputs: list[RequestOutput]) -> None:
        """Count what came, and tell of it when HTTP is ready. The newest snapshot says it all."""
        for output in outputs:
            underway = self._underway.get(output.request_id)
            if underway is None:  # aborted since
                continue
            request = underway.request
            self._metrics.note_tokens(output, request.arrival_time, underway.num_counted)
            if output.finished:
                self._metrics.note_end(output, request.arrival_time)
            if output.finished or request.is_streamed:
                self._news[output.request_id] = output
        if self._is_ready():
            self._flush()

    def _flush(self) -> None:
        news, self._news = self._news, {}
        if news:
            self._deliver([self._progress(output) for output in news.values()])

    def _progress(self, output: RequestOutput) -> Progress:
        """What is new of a request."""
        underway = self._underway[output.request_id]
        if output.finished:
            del self._underway[output.request_id]
        return Progress(
            output.request_id,
            [
                _piece(each, underway)
                for each in output.outputs
                if not underway.is_ended[each.index]
            ],
            output.metrics.num_cached_tokens,
            output.prompt_logprobs,
        )


def _piece(output: CompletionOutput, underway: _Underway) -> Piece:
    """What is new of a completion, made here: its request changes in the engine's thread."""
    index = output.index
    first, text = underway.num_tokens[index], output.text
    piece = Piece(
        index,
        text[underway.num_characters[index] :],
        output.token_ids[first:],
        (output.logprobs or [])[first:],
        output.finish_reason,
    )
    underway.num_characters[index] = len(text)
    underway.num_tokens[index] = output.num_tokens
    underway.is_ended[index] = output.finish_reason is not None
    return piece
