"""The loop around the engine's driver: take orders, compute a step, send its tokens.

    other threads                                  the engine's thread, the main one of its process
    add_requests, abort, report  -- orders --->    between two steps
    deliver(EngineCoreOutputs)   <-- tokens ---    once a step, for all requests together

Only the engine's thread changes the engine, so that no thread waits for a lock while it steps: an
order is a call that this thread makes later. Only the engine's thread sends messages. The driver is
the engine's own; outputs of requests that come here go to a `Sender`. Text and stop strings are
handled where the tokens arrive (`async_engine.py`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import ParamSpec

import torch

from milestone_llm.core.errors import InputError
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.structured.grammars import compiling_threads
from milestone_llm.trace.tracer import Tracer

from .client import (
    Deliver,
    EngineDeadError,
    EngineInfo,
    EngineReport,
    EngineRequest,
    Refusal,
    StepFigures,
    StepSink,
)
from .sender import Sender

Arguments = ParamSpec("Arguments")
log = logging.getLogger(__name__)

MAX_FAILURES = 3
"""Number of failed steps in a row after which the engine is given up."""


class EngineLoop:
    """Runs an engine for other threads: an `EngineClient` whose methods any thread may call."""

    def __init__(self, engine: BaseEngine) -> None:
        self.info = EngineInfo(
            engine.model_name,
            engine.max_model_len,
            engine.config.max_num_seqs,
            engine.config.max_num_batched_tokens,
            engine.scheduler.kv_usage().total,
            engine.vocab_size,
            engine.eos_token_ids,
            engine.tokenizer,
            decoder=engine.decoder_name,
        )
        self.problem: str | None = None
        self._orders = SimpleQueue[Callable[[], None]]()
        self._is_stopping = False
        self._engine, self._log = engine, engine.step_log
        self._sending = Sender()
        self._driver = engine.driver
        self._driver.attach(self._sending)
        self._compiling = compiling_threads()
        self._uncompiled: set[str] = set()
        """Ids of new requests whose grammars are being compiled."""
        self._num_failures = 0
        self._page_tracer: Tracer | None = None

    # -- in any thread -----------------------------------------------------------------------

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests. If the engine rejects one, a message says so.

        Nobody waits while a grammar is compiled, except its own request: it is queued afterwards.
        """
        for request in requests:
            if request.params.structured_outputs is None:
                self._order(self._add, request)
            else:
                self._uncompiled.add(request.request_id)
                self._compiling.submit(self._compile, request)

    def _compile(self, new: EngineRequest) -> None:
        """Compile the grammar of a request, then queue it. Called in a thread for compiling."""
        with contextlib.suppress(Exception):  # `_add` will report it
            self._engine.input_processor.grammars.rule_of(new.params)
        self._order(self._add_compiled, new)

    def abort(self, request_id: str) -> None:
        """End a request in any state. Its memory is free before the next step."""
        self._order(self._abort, request_id)

    def end_completion(self, completion_id: str) -> None:
        """End a completion after a stop string; others of its request go on."""
        self._order(self._finish, [completion_id], "stop")

    def report(self) -> Future[list[EngineReport]]:
        """Ask for a report, which is made between two steps."""
        answer = Future[list[EngineReport]]()
        self._order(self._report, answer)
        return answer

    def reset_prefix_cache(self) -> Future[list[bool | None]]:
        """Forget all cached KV, between two steps. None: this engine has no prefix cache."""
        answer = Future[list[bool | None]]()
        self._order(self._reset_prefix_cache, answer)
        return answer

    def watch(self, sink: StepSink | None) -> None:
        """Send each step's record to `sink`, in the thread of `run`; None ends that."""
        self._order(self._watch, sink)

    def stop(self) -> None:
        """Let `run` return after the current step."""
        self._order(self._stop)

    def _order(
        self,
        work: Callable[Arguments, None],
        *args: Arguments.args,
        **fields: Arguments.kwargs,
    ) -> None:
        self._orders.put(partial(self._try, partial(work, *args, **fields)))

    # -- in the engine's thread --------------------------------------------------------------

    def run(self, deliver: Deliver) -> None:
        """Serve until `stop`.

        Raises:
            EngineDeadError: the device failed, or `MAX_FAILURES` steps in a row did.
        """
        self._sending.deliver_to(deliver)
        while not self._is_stopping:
            if not self._driver.requests:
                self._orders.get()()  # waits for an order
            while not self._orders.empty():
                self._orders.get()()
            if self._driver.requests and not self._is_stopping:
                self._try(self._step)
        for request_id in self._sending.request_ids():
            self._try(partial(self._abort, request_id))
        self._compiling.shutdown(wait=False, cancel_futures=True)

    def _try(self, work: Callable[[], None]) -> None:
        """Do some work, and survive a failure, but not `MAX_FAILURES` in a row.

        Raises:
            EngineDeadError: the device failed, or the last failure was one too many.
        """
        try:
            work()
        except Exception as error:
            self._num_failures += 1
            log.exception("The engine failed; the requests of the step have ended")
            # After one error, a device reports it for every later call.
            if isinstance(error, torch.AcceleratorError) or self._num_failures >= MAX_FAILURES:
                raise EngineDeadError(f"the engine is dead: {error!r}") from error

    def _stop(self) -> None:
        self._is_stopping = True

    def _report(self, answer: Future[list[EngineReport]]) -> None:
        preempted = sum(bool(each.num_preemptions) for each in self._engine.scheduler.waiting)
        stats = {**self._engine.stats(), "waiting_preempted": preempted}
        self._sending.flush()
        if answer.set_running_or_notify_cancel():  # False: the caller has given up
            answer.set_result([EngineReport(stats)])

    def _reset_prefix_cache(self, answer: Future[list[bool | None]]) -> None:
        # Engines have it from M4 on.
        reset: Callable[[], bool] | None = getattr(self._engine, "reset_prefix_cache", None)
        answer.set_result([None if reset is None else reset()])

    def _watch(self, sink: StepSink | None) -> None:
        if self._page_tracer is not None:
            self._log.unwatch(self._page_tracer)
            self._page_tracer = None
        if sink is not None:
            self._page_tracer = Tracer([sink], keeps_records=False)
            self._log.watch(self._page_tracer)

    def _add(self, new: EngineRequest) -> None:
        try:
            self._driver.run(self._queue, new)
        except InputError as error:
            self._sending.refuse(new, Refusal(str(error), 400))
        except Exception as error:
            text = f"the engine failed: {type(error).__name__}"
            self._sending.refuse(new, Refusal(text, 500))
            raise

    def _add_compiled(self, new: EngineRequest) -> None:
        if new.request_id in self._uncompiled:  # else it was aborted meanwhile
            self._uncompiled.remove(new.request_id)
            self._add(new)

    def _queue(self, new: EngineRequest) -> None:
        completions = self._engine.input_processor.make(
            new.prompt_token_ids, new.params, new.request_id, new.priority
        )
        self._driver.add(completions)
        self._sending.add(new)

    def _abort(self, request_id: str) -> None:
        self._uncompiled.discard(request_id)
        # Forks are ended before the completion they fork from.
        self._finish(self._sending.completion_ids(request_id)[::-1], "abort")

    def _finish(self, completion_ids: list[str], reason: str) -> None:
        """End completions whose client knows that they have ended."""
        self._sending.mute(completion_ids)
        self._driver.run(self._driver.finish, completion_ids, reason)

    def _step(self) -> None:
        before = dict(self._log.counts)
        start = time.perf_counter()
        self._driver.run(self._driver.step)
        if self._log.counts["steps"] > before["steps"]:
            seconds = self._sending.took_at - start
            self._num_failures = 0
            new = {name: number - before[name] for name, number in self._log.counts.items()}
            num_tokens = new["prefill_tokens"] + new["decode_tokens"]
            self._sending.note_step(StepFigures(seconds, new["rows"], num_tokens))
