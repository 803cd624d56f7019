"""The loop around the engine: orders in, a step, what it brought out.

    others' threads                          the engine's thread, the main one of its process
    submit, abort, report  -- orders -->     between two steps
    deliver(list)          <-- progress --   at most once a step, for all requests together

Only the engine's thread touches the engine, so that no thread waits for a lock while it steps.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue

import torch

from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.frontend.outputs import CompletionOutput, RequestOutput
from milestone_llm.threads import ThreadWatch
from milestone_llm.lab.trace.tracer import Tracer

from .engine_client import (
    EngineDeadError,
    EngineInfo,
    EngineReport,
    EngineRequest,
    Piece,
    Progress,
    StepSink,
)
from .engine_metrics import EngineMetrics

log = logging.getLogger(__name__)

PACE = 20.0
"""News go out at most once in so many times the CPU time that it took to tell the last ones: every
step where few are streaming, those of several steps together where hundreds are. The engine waits
while its news are told."""
MAX_PAUSE = 0.05
"""Seconds between news at most: where each token costs much, telling it later is no cheaper."""
MAX_FAILURES = 3
"""Steps that fail one after the other before the engine is given up."""


class _Underway:
    """A request that the engine has: how much of each completion has been passed on."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        n = request.params.n
        self.num_characters, self.num_tokens = [0] * n, [0] * n
        self.is_ended = [False] * n
        self.num_counted = [0] * n  # tokens that the metrics know


class EngineLoop:
    """Runs an engine for others: an `EngineClient` whose methods may be called from any thread."""

    def __init__(self, engine: BaseEngine) -> None:
        self.info = EngineInfo(
            engine.model_name,
            engine.max_model_len,
            engine.config.max_num_seqs,
            engine.scheduler.kv_usage().total,
            engine.tokenizer,
        )
        self.problem: str | None = None
        self._engine = engine
        self._metrics = EngineMetrics()
        self._orders: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._deliver: Callable[[list[Progress]], None]
        self._is_wanted = True
        self._next_news = 0.0
        """Time (`perf_counter`) before which nothing is told, unless the engine idles."""
        self._underway: dict[str, _Underway] = {}
        self._news: dict[str, RequestOutput] = {}
        self._num_failures = 0
        self._is_stopped = False
        self._sink: StepSink | None = None
        self._own_tracer = Tracer(keeps_records=False)
        self._threads = ThreadWatch(engine.model.device.type, log.warning)

    # -- from any thread ---------------------------------------------------------------------

    def submit(self, requests: list[EngineRequest]) -> None:
        """Queue requests. If the engine refuses one, its progress says so."""
        for request in requests:
            self._orders.put(partial(self._add, request))

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; before the next step it has no memory any more."""
        self._orders.put(partial(self._abort, request_id))

    def want_more(self) -> None:
        """Let news out with the next step."""
        self._is_wanted = True

    def report(self) -> Future[list[EngineReport]]:
        """The figures as they are between two steps."""
        answer: Future[list[EngineReport]] = Future()
        self._orders.put(partial(self._report, answer))
        return answer

    def watch(self, sink: StepSink | None) -> None:
        """Give each step's record to `sink`, in the engine's thread; None: to nobody any more."""
        self._orders.put(partial(self._watch, sink))

    def stop(self) -> None:
        """Let `run` return after the step under way."""
        self._orders.put(self._stop)

    # -- in the engine's thread --------------------------------------------------------------

    def run(self, deliver: Callable[[list[Progress]], None]) -> None:
        """Serve until `stop`.

        Args:
            deliver: called in this thread with what steps have brought, at most once a step, and
                not again before `want_more` unless the engine is idle or refuses a request.

        Raises:
            EngineDeadError: the device failed, or `MAX_FAILURES` steps in a row did.
        """
        self._deliver = deliver
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

    def _report(self, answer: Future[list[EngineReport]]) -> None:
        if not answer.set_running_or_notify_cancel():  # nobody waits for it any more
            return
        waiting = self._engine.scheduler.waiting
        preempted = sum(bool(each.metrics.num_preemptions) for each in waiting)
        stats = {**self._engine.stats(), "waiting_preempted": preempted}
        answer.set_result([EngineReport(stats, self._metrics)])

    def _watch(self, sink: StepSink | None) -> None:
        """Trace the engine while a page is open, or if a trace was asked for."""
        engine = self._engine
        if isinstance(engine.tracer, Tracer) and self._sink in engine.tracer.sinks:
            engine.tracer.sinks.remove(self._sink)
        if engine.tracer is self._own_tracer:
            engine.tracer = None
        self._sink = sink
        if sink is not None:
            if engine.tracer is None:
                engine.tracer = self._own_tracer
            if isinstance(engine.tracer, Tracer):
                engine.tracer.sinks.append(sink)

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
            self._threads.note_step(seconds, len(outputs))
        self._pass_on(outputs)

    def _pass_on(self, outputs: list[RequestOutput]) -> None:
        """Count what came, and tell of it when it is time. The newest snapshot says it all."""
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
        if self._is_wanted and time.perf_counter() >= self._next_news:
            self._flush()

    def _flush(self) -> None:
        news, self._news = self._news, {}
        if news:
            start = time.thread_time()
            self._is_wanted = False
            self._deliver([self._progress(output) for output in news.values()])
            spent = time.thread_time() - start
            self._next_news = time.perf_counter() + min(MAX_PAUSE, (PACE - 1) * spent)

    def _progress(self, output: RequestOutput) -> Progress:
        """What is new of a request."""
        underway = self._underway[output.request_id]
        if output.finished:
            del self._underway[output.request_id]
        is_first = not any(underway.num_tokens)
        unfinished = [each for each in output.outputs if not underway.is_ended[each.index]]
        return Progress(
            output.request_id,
            [_piece(each, underway) for each in unfinished],
            output.metrics.num_cached_tokens,
            output.prompt_logprobs if is_first else None,
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
