"""A replica: an engine in a Ray actor. Its loop runs in one thread, Ray's calls in another."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace

from ray import serve

from milestone_llm.cli import model_libraries
from milestone_llm.core.outputs import EngineCoreOutput

from ..engine.client import (
    EngineCoreOutputs,
    EngineDeadError,
    EngineInfo,
    EngineReport,
    EngineRequest,
    StepFigures,
)
from ..engine.process import EngineSpec
from .ray_router import Routing

MAX_ONGOING = 2**20
"""Requests that Ray may send to a replica at one time. They wait in the engine's queue, not in
Ray."""
SWITCH_SECONDS = 0.0005
"""Seconds that the engine's thread waits for Ray's thread, at most, after a step."""

log = logging.getLogger(__name__)


class Replica:
    """An engine in a Ray actor."""

    def __init__(self, spec: EngineSpec) -> None:
        with model_libraries(spec.num_threads):
            from ..engine.loop import EngineLoop

            self._loop = EngineLoop(spec.build())
        sys.setswitchinterval(SWITCH_SECONDS)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._event_loop: asyncio.AbstractEventLoop
        self._queues: dict[str, asyncio.Queue[EngineCoreOutputs]] = {}
        """Queues for the outputs of each completion, by its id."""
        self._steps: list[StepFigures] = []
        """Steps that no answer has reported."""
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._loop.run(self._deliver)
        except EngineDeadError:  # Ray tells every caller, and starts another replica
            log.exception("The replica ends")
            os._exit(1)

    def info(self) -> EngineInfo:
        """Return the values that do not change."""
        return self._loop.info

    async def report(self) -> EngineReport:
        """Return a report, made between two steps."""
        (report,) = await asyncio.wrap_future(self._loop.report())
        return replace(report, engine=self._name)

    async def reset_prefix_cache(self) -> bool | None:
        """Forget all cached KV, between two steps. None: the engine has no prefix cache."""
        (is_done,) = await asyncio.wrap_future(self._loop.reset_prefix_cache())
        return is_done

    async def end_completion(self, completion_id: str) -> None:
        """End a completion after a stop string. It may belong to another replica: then do
        nothing.

        The engine reports no end that HTTP has told it, so `generate` is told here.
        """
        if (queue := self._queues.get(completion_id)) is not None:
            self._loop.end_completion(completion_id)
            end = EngineCoreOutput(completion_id, finish_reason="stop")
            queue.put_nowait(EngineCoreOutputs(others=[end]))

    async def generate(
        self, request: EngineRequest, routing: Routing
    ) -> AsyncIterator[EngineCoreOutputs]:
        """Yield the outputs of a request. If the tokens are neither streamed nor searched for stop
        strings, they come all at once at the end: then another replica can compute the request
        again.

        Args:
            routing: for `PrefixRouter`.
        """
        self._event_loop = asyncio.get_running_loop()
        queue = asyncio.Queue[EngineCoreOutputs]()
        unfinished = set(request.completion_ids)
        mine = dict.fromkeys(unfinished, queue)
        is_whole = not (request.is_streamed or request.params.stop)
        self._queues |= mine
        self._loop.add_requests([request])
        try:
            outputs = EngineCoreOutputs(engine=self._name)
            while unfinished:
                outputs.extend(await queue.get())
                unfinished -= {each.request_id for each in outputs.others if each.finish_reason}
                if outputs.refusals:
                    unfinished.clear()
                if not unfinished or (queue.empty() and not is_whole):  # else Ray is late
                    outputs.time, outputs.steps = time.perf_counter(), self._steps
                    self._steps = []
                    yield outputs
                    outputs = EngineCoreOutputs(engine=self._name)
        finally:
            for completion_id in mine:
                del self._queues[completion_id]
            if unfinished:
                self._loop.abort(request.request_id)

    def _deliver(self, message: EngineCoreOutputs) -> None:
        """Hand over outputs to Ray's event loop. Called in the engine's thread."""
        self._event_loop.call_soon_threadsafe(self._pass_on, message)

    def _pass_on(self, message: EngineCoreOutputs) -> None:
        """Give each caller the outputs of its own request."""
        parts: dict[asyncio.Queue[EngineCoreOutputs], EngineCoreOutputs] = {}

        def part_of(name: str) -> EngineCoreOutputs:
            queue = self._queues.get(name) or asyncio.Queue()  # the caller may have gone
            return parts.setdefault(queue, EngineCoreOutputs())

        self._steps += message.steps
        for output in message.outputs():
            part_of(output.request_id).add(output)
        for name, refusal in message.refusals.items():
            part_of(name).refusals[name] = refusal
        for queue, part in parts.items():
            queue.put_nowait(part)
