"""The loop around the core: orders in, a step, its tokens out.

    others' threads                                the engine's thread, the main one of its process
    add_requests, abort, report  -- orders --->    between two steps
    deliver(EngineCoreOutputs)   <-- tokens ---    once a step, for all requests of one of HTTP's
                                                   processes together

Only the engine's thread touches the core, so that no thread waits for a lock while it steps. And
only that thread speaks: whatever leaves the loop leaves it there. Text and stop strings are made
where the tokens go (`async_engine.py`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial

import torch

from milestone_llm.command.threads import ThreadWatch
from milestone_llm.core.errors import InputError
from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.core.request import Request
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.trace.tracer import Tracer

from .engine_client import (
    Begun,
    Deliver,
    EngineCoreOutputs,
    EngineDeadError,
    EngineInfo,
    EngineReport,
    EngineRequest,
    Refusal,
    StepSink,
)
from .engine_metrics import EngineMetrics
from .orders import OrderingClient, Orders

log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Steps that fail one after the other before the engine is given up."""


class CompletionState:
    """A completion that the core has not finished.

    Args:
        new: what was asked for.
    """

    def __init__(self, request: Request, new: EngineRequest) -> None:
        self.request = request
        self.of_request = new.request_id
        """Of which request it is a completion."""
        self.arrival_time = new.arrival_time
        self.sender = new.sender
        self.num_sent = 0
        """Tokens that have left the loop."""
        self.last_time = 0.0
        """When the last of them did."""

    def missing(self) -> EngineCoreOutput:
        """What the core knows and has not left the loop, after an interruption anywhere."""
        request, first = self.request, self.num_sent
        tokens, logprobs = request.output_token_ids[first:], request.logprobs[first:]
        return EngineCoreOutput(request.request_id, tokens, logprobs, request.finish_reason)


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
            engine.vocab_size,
            engine.eos_token_ids,
            engine.tokenizer,
        )
        self.problem: str | None = None
        self.watching: set[int] = set()
        """Which of HTTP's processes get the records of steps."""
        self._engine, self._core = engine, engine.core
        self._metrics = EngineMetrics()
        self._deliver: Deliver
        self._on_report: Callable[[list[EngineReport]], None]
        self._on_step: StepSink
        self._requests: dict[str, list[Request]] = {}
        """The completions of each."""
        self._completions: dict[str, CompletionState] = {}
        self._num_failures = 0
        self._page_tracer: Tracer | None = None
        self._threads = ThreadWatch(engine.model.device.type, log.warning)

    def run(
        self,
        deliver: Deliver,
        on_report: Callable[[list[EngineReport]], None] | None = None,
        on_step: StepSink | None = None,
    ) -> None:
        """Serve until `stop`.

        Args:
            on_report, on_step: called in this thread, instead of those who asked or watch here.

        Raises:
            EngineDeadError: the device failed, or `MAX_FAILURES` steps in a row did.
        """
        self._deliver = deliver
        self._on_report = on_report or self.take_report
        self._on_step = on_step or self.take_step
        is_last = False
        while not is_last:
            orders = self.orders.take(waits=not self._requests)
            self._carry_out(orders)
            is_last = orders.is_last
            if not is_last and self._requests:
                self._try(self._step)
        for request_id in list(self._requests):
            self._try(partial(self._abort, request_id))

    def _carry_out(self, orders: Orders) -> None:
        for request_id in orders.aborts:
            self._try(partial(self._abort, request_id))
        for completion_id in orders.stops:
            self._try(partial(self._stop, completion_id))
        for request in orders.requests.values():
            self._try(partial(self._add, request))
        for sender, is_watching in orders.watching.items():
            self._watch(sender, is_watching)
        for sender in orders.gone:
            self._drop(sender)
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
            self._recover()
            # What a device reports once, it reports for ever.
            if isinstance(error, torch.AcceleratorError) or self._num_failures >= MAX_FAILURES:
                raise EngineDeadError(f"the engine is dead: {error!r}") from error

    def _recover(self) -> None:
        """After whatever was raised: go on with the requests as they are."""
        states = list(self._completions.values())
        self._core.restart([state.request for state in states])
        outputs = [state.missing() for state in states]
        self._take([each for each in outputs if each.new_token_ids or each.finish_reason])
        self._core.close_steps()

    def _report(self) -> None:
        preempted = sum(bool(each.num_preemptions) for each in self._engine.scheduler.waiting)
        stats = {**self._engine.stats(), "waiting_preempted": preempted}
        self._on_report([EngineReport(stats, self._metrics)])

    def _watch(self, sender: int, is_watching: bool) -> None:
        self.watching -= {sender}
        self.watching |= {sender} if is_watching else set()
        watchers = self._core.watchers
        if self._page_tracer is not None and not self.watching:
            watchers.remove(self._page_tracer)
            self._page_tracer = None
        elif self._page_tracer is None and self.watching:
            self._page_tracer = Tracer([self._on_step], keeps_records=False)
            watchers.append(self._page_tracer)

    def _drop(self, sender: int) -> None:
        """One of HTTP's processes has ended, and with it all of its clients."""
        self._watch(sender, False)
        theirs = [each for each in self._completions.values() if each.sender == sender]
        for request_id in dict.fromkeys(each.of_request for each in theirs):
            self._try(partial(self._abort, request_id))

    def _add(self, new: EngineRequest) -> None:
        name, refusal = new.request_id, None
        try:
            completions = self._engine.input_processor.number(
                new.prompt_token_ids, new.params, name, new.priority
            )
            self._core.add_request(*completions)
            self._requests[name] = completions
            for each in completions:
                self._completions[each.request_id] = CompletionState(each, new)
        except InputError as error:
            refusal = Refusal(str(error), 400)
        except Exception as error:
            refusal = Refusal(f"the engine failed: {type(error).__name__}", 500)
            raise
        finally:
            if refusal is not None:
                self._deliver(EngineCoreOutputs(sender=new.sender, refusals={name: refusal}))

    def _abort(self, request_id: str) -> None:
        if (completions := self._requests.get(request_id)) is None:
            return
        try:
            for completion in reversed(completions):  # forks before what they fork from
                self._finish(completion.request_id, "abort")
        except Exception:
            self.abort(request_id)  # once more, after the next step
            raise
        self._core.close_steps()

    def _stop(self, completion_id: str) -> None:
        self._finish(completion_id, "stop")
        self._core.close_steps()

    def _finish(self, completion_id: str, reason: str) -> None:
        if (state := self._completions.get(completion_id)) is not None:
            if not state.request.is_finished:
                self._core.finish_request(state.request, reason)
            self._note_end(completion_id, reason)

    def _step(self) -> None:
        counts = dict(self._core.counts)
        start = time.perf_counter()
        outputs = self._core.step()
        seconds = time.perf_counter() - start
        self._take(outputs)
        self._core.close_steps()
        if self._core.counts["steps"] > counts["steps"]:
            self._num_failures = 0
            self._metrics.note_step(seconds, counts, self._core.counts)
            self._threads.note_step(seconds, len(outputs))

    def _take(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Send what the core has brought, and count it."""
        messages: dict[int, EngineCoreOutputs] = {}
        now, num_tokens, gaps = time.perf_counter(), 0, Counter[float]()
        for output in outputs:
            state, num_new = self._completions[output.request_id], len(output.new_token_ids)
            if (message := messages.get(state.sender)) is None:
                message = messages[state.sender] = EngineCoreOutputs(now, state.sender)
            message.add(output)
            if num_new > 1:
                gaps[0.0] += num_new - 1
            if num_new and state.num_sent:
                gaps[now - state.last_time] += 1
            elif num_new and state.request.index == 0:
                request = state.request
                is_asked = request.sampling_params.prompt_logprobs is not None
                logprobs = request.prompt_logprobs if is_asked else None
                message.begun[output.request_id] = Begun(request.num_cached_tokens, logprobs)
                self._metrics.note_first_token(request, state.arrival_time, now)
            state.num_sent += num_new
            state.last_time = now
            num_tokens += num_new
            if output.finish_reason is not None:
                self._note_end(output.request_id, output.finish_reason)
        self._metrics.note_tokens(num_tokens, gaps)
        for message in messages.values():
            self._deliver(message)

    def _note_end(self, completion_id: str, reason: str) -> None:
        """A completion has ended; with the last one, so has its request."""
        self._core.note_end(completion_id, reason)
        state = self._completions.pop(completion_id)
        completions = self._requests.get(state.of_request)
        if completions is not None and all(each.is_finished for each in completions):
            del self._requests[state.of_request]
            self._metrics.note_end(completions, state.arrival_time, time.perf_counter())
