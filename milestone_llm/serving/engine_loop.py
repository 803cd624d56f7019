"""The loop around the engine: commands in, a step, what it brought out.

    others' threads                                the engine's thread, the main one of its process
    add_requests, abort, report  -- orders --->    between two steps
    deliver(list)                <-- deltas ---    at most once a step, for all requests together

Only the engine's thread touches the engine, so that no thread waits for a lock while it steps. And
only that thread speaks: whatever leaves the loop leaves it there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial

import torch

from milestone_llm.core.errors import InputError
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.frontend.outputs import CompletionOutput, RequestOutput
from milestone_llm.lab.threads import ThreadWatch
from milestone_llm.lab.trace.tracer import Tracer

from .engine_client import (
    CompletionDelta,
    EngineDeadError,
    EngineInfo,
    EngineReport,
    EngineRequest,
    RequestDelta,
    StepSink,
)
from .engine_metrics import EngineMetrics
from .orders import OrderingClient, Orders

log = logging.getLogger(__name__)

PACE = 20.0
"""Deltas are sent at most once in so many times the CPU time that it took to send the last ones:
every step where few are streaming, those of several steps together where hundreds are. The engine
waits while they are made."""
MAX_PAUSE = 0.05
"""Seconds between two times at most: where each token costs much, waiting makes none cheaper."""
MAX_FAILURES = 3
"""Steps that fail one after the other before the engine is given up."""


class _RequestState:
    """A request that the engine has: how much of each completion has been sent."""

    def __init__(self, request: EngineRequest) -> None:
        self.request = request
        n = request.params.n
        self.num_sent_characters, self.num_sent_tokens = [0] * n, [0] * n
        self.is_ended = [False] * n
        self.num_counted = [0] * n  # tokens that the metrics know

    def delta(self, output: RequestOutput) -> RequestDelta:
        """What is new of the request; it counts as sent from now on."""
        is_first = not any(self.num_sent_tokens)
        return RequestDelta(
            output.request_id,
            [self._completion(each) for each in output.outputs if not self.is_ended[each.index]],
            output.metrics.num_cached_tokens,
            output.prompt_logprobs if is_first else None,
        )

    def _completion(self, output: CompletionOutput) -> CompletionDelta:
        index, text = output.index, output.text
        first = self.num_sent_tokens[index]
        delta = CompletionDelta(
            index,
            text[self.num_sent_characters[index] :],
            output.token_ids[first:],
            (output.logprobs or [])[first:],
            output.finish_reason,
        )
        self.num_sent_characters[index] = len(text)
        self.num_sent_tokens[index] = output.num_tokens
        self.is_ended[index] = output.finish_reason is not None
        return delta


class EngineLoop(OrderingClient):
    """Runs an engine for others: an `EngineClient` whose methods may be called from any thread."""

    def __init__(self, engine: BaseEngine) -> None:
        super().__init__()
        self.info = EngineInfo(
            engine.model_name,
            engine.max_model_len,
            engine.config.max_num_seqs,
            engine.config.max_num_batched_tokens,
            engine.scheduler.kv_usage().total,
            engine.tokenizer,
        )
        self.problem: str | None = None
        self._engine = engine
        self._metrics = EngineMetrics()
        self._deliver: Callable[[list[RequestDelta]], None]
        self._on_report: Callable[[list[EngineReport]], None]
        self._on_step: StepSink
        self._is_wanted = True
        self._next_send = 0.0
        """Time (`perf_counter`) before which nothing is sent, unless the engine idles."""
        self._states: dict[str, _RequestState] = {}
        self._unsent: dict[str, RequestOutput] = {}
        self._num_failures = 0
        self._page_tracer: Tracer | None = None
        self._threads = ThreadWatch(engine.model.device.type, log.warning)

    # -- from any thread ---------------------------------------------------------------------

    def put(self, orders: Orders) -> None:
        """Pass on orders that came together from another process."""
        if orders.wants_more:
            self.want_more()
        self.orders.put(orders)

    def want_more(self) -> None:
        """Send tokens with the next step, or with the one under way."""
        self._is_wanted = True

    # -- in the engine's thread --------------------------------------------------------------

    def run(
        self,
        deliver: Callable[[list[RequestDelta]], None],
        on_report: Callable[[list[EngineReport]], None] | None = None,
        on_step: StepSink | None = None,
    ) -> None:
        """Serve until `stop`.

        Args:
            deliver: called in this thread with what steps have brought, at most once a step, and
                not again before `want_more` unless the engine is idle or refuses a request.
            on_report, on_step: called in this thread, instead of those who asked or watch here.

        Raises:
            EngineDeadError: the device failed, or `MAX_FAILURES` steps in a row did.
        """
        self._deliver = deliver
        self._on_report = on_report or self.take_report
        self._on_step = on_step or self.take_step
        is_last = False
        while not is_last:
            is_idle = not self._engine.has_unfinished_requests()
            if is_idle:  # nobody else wants the interpreter
                self._send()
            orders = self.orders.take(waits=is_idle)
            self._carry_out(orders)
            is_last = orders.is_last
            if not is_last and self._engine.has_unfinished_requests():
                self._try(self._step)
        for request_id in list(self._states):
            self._try(partial(self._abort, request_id))

    def _carry_out(self, orders: Orders) -> None:
        for request_id in orders.aborts:
            self._try(partial(self._abort, request_id))
        for request in orders.requests.values():
            self._try(partial(self._add, request))
        if orders.is_watched is not None:
            self._watch(orders.is_watched)
        if orders.wants_report:
            self._try(self._report)

    def _try(self, work: Callable[[], None]) -> None:
        """Let the engine do something. Whatever it is, three failures in a row are the end.

        Raises:
            EngineDeadError: they were.
        """
        try:
            work()
        except Exception as error:
            self._num_failures += 1
            log.exception("The engine failed; the requests of the step have ended")
            self._take(self._engine.take_outputs())
            self._send()
            # What a device reports once, it reports for ever.
            if isinstance(error, torch.AcceleratorError) or self._num_failures >= MAX_FAILURES:
                raise EngineDeadError(f"the engine is dead: {error!r}") from error

    def _report(self) -> None:
        preempted = sum(bool(each.num_preemptions) for each in self._engine.scheduler.waiting)
        stats = {**self._engine.stats(), "waiting_preempted": preempted}
        self._on_report([EngineReport(stats, self._metrics)])

    def _watch(self, is_watched: bool) -> None:
        watchers = self._engine.core.watchers
        if self._page_tracer is not None:
            watchers.remove(self._page_tracer)
            self._page_tracer = None
        if is_watched:
            self._page_tracer = Tracer([self._on_step], keeps_records=False)
            watchers.append(self._page_tracer)

    def _add(self, request: EngineRequest) -> None:
        name = request.request_id
        try:
            self._engine.add_request(
                request.prompt_token_ids, request.params, name, request.priority
            )
        except InputError as error:
            self._deliver([RequestDelta(name, refusal=str(error))])
        except Exception as error:
            text = f"the engine failed: {type(error).__name__}"
            self._deliver([RequestDelta(name, refusal=text, status=500)])
            raise
        else:
            self._states[name] = _RequestState(request)

    def _abort(self, request_id: str) -> None:
        try:
            output = self._engine.abort(request_id)
        except Exception:
            self.abort(request_id)  # once more, after the next step
            raise
        state = self._states.pop(request_id, None)
        self._unsent.pop(request_id, None)
        if state is not None and output is not None:
            self._metrics.note_end(output, state.request.arrival_time)

    def _step(self) -> None:
        counts = dict(self._engine.counts)
        start = time.perf_counter()
        outputs = self._engine.step()
        seconds = time.perf_counter() - start
        if self._engine.counts["steps"] > counts["steps"]:
            self._num_failures = 0
            self._metrics.note_step(seconds, counts, self._engine.counts)
            self._threads.note_step(seconds, len(outputs))
        self._take(outputs)
        if self._is_wanted and time.perf_counter() >= self._next_send:
            self._send()

    def _take(self, outputs: list[RequestOutput]) -> None:
        """Count what came, and keep it until it is sent. The newest snapshot has it all."""
        for output in outputs:
            state = self._states.get(output.request_id)
            if state is None:  # aborted since
                continue
            request = state.request
            self._metrics.note_tokens(output, request.arrival_time, state.num_counted)
            if output.finished:
                self._metrics.note_end(output, request.arrival_time)
            if output.finished or request.is_streamed:
                self._unsent[output.request_id] = output

    def _send(self) -> None:
        outputs, self._unsent = self._unsent, {}
        if outputs:
            start = time.thread_time()
            self._is_wanted = False
            self._deliver([self._delta(output) for output in outputs.values()])
            spent = time.thread_time() - start
            self._next_send = time.perf_counter() + min(MAX_PAUSE, (PACE - 1) * spent)

    def _delta(self, output: RequestOutput) -> RequestDelta:
        """Made here, since a request changes in the engine's thread."""
        name = output.request_id
        state = self._states.pop(name) if output.finished else self._states[name]
        return state.delta(output)
