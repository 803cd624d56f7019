"""A replica: an engine in a Ray actor. Its loop has a thread, and Ray's calls another."""

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

from milestone_llm.lab.cli import model_libraries

from .async_engine import AsyncEngine
from .engine_client import EngineDeadError, EngineInfo, EngineReport, EngineRequest, RequestDelta
from .engine_spec import EngineSpec
from .errors import ApiError
from .metrics import Metrics
from .replica_router import Routing

MAX_ONGOING = 2**20
"""Requests that Ray lets a replica have: who waits, waits in the engine's queue."""
SWITCH_SECONDS = 0.0005
"""For how long the engine's thread waits for Ray's, at most, when a step is done."""

log = logging.getLogger(__name__)


class Replica:
    """An engine in a Ray actor."""

    def __init__(self, spec: EngineSpec) -> None:
        with model_libraries(spec.num_threads):
            from .engine_loop import EngineLoop

            self._loop = EngineLoop(spec.build())
        sys.setswitchinterval(SWITCH_SECONDS)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._engine = AsyncEngine(self._loop, Metrics(""), max_choices=MAX_ONGOING)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self._loop.run(self._engine.deliver)
        except EngineDeadError:  # every caller is told by Ray, which starts another
            log.exception("The replica ends")
            os._exit(1)

    def info(self) -> EngineInfo:
        """What does not change."""
        return self._loop.info

    async def report(self) -> EngineReport:
        """The figures as they are between two steps."""
        (report,) = await asyncio.wrap_future(self._loop.report())
        return replace(report, replica=self._name)

    async def generate(
        self, request: EngineRequest, age: float, routing: Routing
    ) -> AsyncIterator[RequestDelta]:
        """What comes of a request, at the pace of `AsyncEngine`.

        Args:
            age: seconds since the client asked: machines do not share a clock.
            routing: for `PrefixRouter`.
        """
        self._engine.event_loop = asyncio.get_running_loop()
        request = replace(request, arrival_time=time.perf_counter() - age)
        api_request = self._engine.open_request(request.params.n)
        try:
            api_request.start([request], None)
            while deltas := await api_request.deltas():
                cached, prompt = api_request.num_cached_tokens[0], api_request.prompt_logprobs[0]
                yield RequestDelta(request.request_id, deltas, cached, prompt)
                api_request.prompt_logprobs[0] = None
        except ApiError as error:
            yield RequestDelta(request.request_id, refusal=error.detail, status=error.status_code)
        finally:
            api_request.close()
