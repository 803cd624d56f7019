"""Several engines behind one HTTP server: replicas of a Ray Serve deployment.

    HTTP's process                                    a Ray actor for each engine
    Replicas   a task a request  -- generate -->      Replica: EngineLoop in a thread, and a queue
               deliver           <-- a stream --      a request: outputs since the last item
    PrefixRouter  which replica?

Ray starts replicas on one machine or several, replaces those that end, and adds and removes them as
the queue grows and shrinks. `Router` decides which of them gets a prompt.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import threading
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.schema import LoggingConfig

from milestone_llm.core.errors import InputError

from ..engine.client import (
    Deliver,
    EngineCoreOutputs,
    EngineDeadError,
    EngineInfo,
    EngineReport,
    EngineRequest,
    Refusal,
    StepSink,
)
from ..engine.process import EngineSpec
from .actor import MAX_ONGOING, Replica
from .ray_router import PrefixRouter, Routing

NAME = "engines"
"""Name of the application and of its deployment."""
LOOK_SECONDS = 0.5
"""Seconds between two checks of how many replicas run."""
MAX_TRIES = 3
"""Number of replicas that a request tries before it fails."""
REPLICA_LOST = (RayActorError, ReplicaUnavailableError)
DRAIN_SECONDS = 60.0
"""Seconds that requests may go on in a replica that autoscaling removes."""
DEFAULT_BLOCK_SIZE = 16
QUIET = LoggingConfig(log_level="WARNING", enable_access_log=False)

log = logging.getLogger(__name__)


class Replicas:
    """An `EngineClient` that distributes requests over replicas. Use it in a `with` block.

    Args:
        num_replicas: number of engines; with autoscaling, the lowest number.
        address: address of a Ray cluster; None starts one on this machine.
        autoscaling: fields of Ray Serve's AutoscalingConfig; empty for a fixed number.

    Raises:
        InputError: the engine could not be built as requested.
    """

    def __init__(
        self,
        spec: EngineSpec,
        num_replicas: int,
        address: str | None = None,
        autoscaling: dict[str, Any] | None = None,
    ) -> None:
        self.problem: str | None = None
        self._deliver: Deliver
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._has_ended = threading.Event()
        self._is_ray_ours = address is None
        max_replicas = max(num_replicas, (autoscaling or {}).get("max_replicas", 0))
        _start_ray(address, max_replicas)
        self._handle = _deploy(spec, num_replicas, autoscaling or {})
        self._generate = self._handle.options(method_name="generate", stream=True)
        info: EngineInfo = self._handle.info.remote().result()
        num_rows = info.max_num_seqs * max_replicas
        self.info = replace(info, max_num_seqs=num_rows, engine="all")

    # -- for HTTP, in its event loop ---------------------------------------------------------

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Send each request to a replica, and deliver its outputs."""
        for request in requests:
            task = asyncio.get_running_loop().create_task(self._follow(request))
            self._tasks[request.request_id] = task
            task.add_done_callback(partial(self._forget, request.request_id))

    def abort(self, request_id: str) -> None:
        """End a request, also in its replica."""
        if task := self._tasks.get(request_id):
            task.cancel()

    def end_completion(self, completion_id: str) -> None:
        """End a completion in the replica that has it. All are told; the others do not know its
        id."""
        self._handle.broadcast("end_completion", (completion_id,))

    def watch(self, sink: StepSink | None) -> None:
        """Do nothing: one page cannot show several engines."""

    def report(self) -> Future[list[EngineReport]]:
        """Ask for a report of each running replica."""
        return asyncio.run_coroutine_threadsafe(self._ask_all(), asyncio.get_running_loop())

    async def _ask_all(self) -> list[EngineReport]:
        replies = await self._handle.broadcast("report").results_async(return_exceptions=True)
        return [each for each in replies if isinstance(each, EngineReport)]

    def reset_prefix_cache(self) -> Future[list[bool | None]]:
        """Forget all cached KV of each running replica. False: a replica did not answer."""
        return asyncio.run_coroutine_threadsafe(self._reset_all(), asyncio.get_running_loop())

    async def _reset_all(self) -> list[bool | None]:
        asked = self._handle.broadcast("reset_prefix_cache")
        replies = await asked.results_async(return_exceptions=True)
        return [each if each in (True, None) else False for each in replies]

    async def _follow(self, request: EngineRequest) -> None:
        """Deliver a replica's outputs. If it is lost before it has sent any, ask another one."""
        num_tokens = request.most_tokens(self.info.max_model_len)
        routing = Routing(self.info.num_kv_blocks, num_tokens)
        for num_tries in range(1, MAX_TRIES + 1):
            has_begun = False
            stream = self._generate.remote(request, routing)
            try:
                async for outputs in stream:
                    has_begun = True
                    self._deliver(outputs.arrived())
                return
            except asyncio.CancelledError:
                stream.cancel()
                raise
            except REPLICA_LOST:
                if has_begun or num_tries == MAX_TRIES:
                    text = "the replica that computed this request has ended"
                    self._refuse(request.request_id, Refusal(text, 503))
                    return

    def _forget(self, request_id: str, task: asyncio.Task[None]) -> None:
        del self._tasks[request_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("A request failed", exc_info=error)
            text = f"the request failed: {type(error).__name__}"
            self._refuse(request_id, Refusal(text, 500))

    def _refuse(self, request_id: str, refusal: Refusal) -> None:
        self._deliver(EngineCoreOutputs(refusals={request_id: refusal}))

    # -- in the main thread ------------------------------------------------------------------

    def run(self, deliver: Deliver) -> None:
        """Serve until `stop`.

        Raises:
            EngineDeadError: Ray does not answer any more.
        """
        self._deliver = deliver
        while not self._has_ended.wait(LOOK_SECONDS):
            try:
                status = serve.status().applications[NAME].deployments[NAME]
            except Exception as error:
                raise EngineDeadError(f"Ray does not answer any more: {error!r}") from error
            is_running = status.replica_states.get("RUNNING", 0) > 0
            self.problem = None if is_running else "no replica runs at present"

    def stop(self) -> None:
        """Let `run` return."""
        self._has_ended.set()

    def __enter__(self) -> Replicas:
        return self

    def __exit__(self, *error: object) -> None:
        if not self._is_ray_ours:
            with contextlib.suppress(Exception):  # Ray itself may have ended
                serve.delete(NAME)
        ray.shutdown()


def _start_ray(address: str | None, max_replicas: int) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # send no usage statistics unasked
    num_cpus = None if address else max(max_replicas, os.cpu_count() or 1)
    ray.init(
        address or "local",
        num_cpus=num_cpus,
        include_dashboard=None if address else False,
        logging_level=logging.WARNING,
    )
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    serve.start(proxy_location="Disabled", logging_config=QUIET)


def _deploy(spec: EngineSpec, num_replicas: int, autoscaling: dict[str, Any]) -> DeploymentHandle:
    """Start the replicas, and wait until they are ready.

    Raises:
        InputError: an engine could not be built as requested, or Ray knows no such field.
    """
    has_gpus = ray.cluster_resources().get("GPU", 0) and spec.fields.get("device") != "cpu"
    number: dict[str, Any] = {"num_replicas": num_replicas}
    if autoscaling:
        known = AutoscalingConfig.model_fields
        if unknown := [name for name in autoscaling if name not in known]:
            text = f"Ray Serve's AutoscalingConfig has no field {unknown[0]!r}; it has "
            raise InputError(text + ", ".join(known))
        number = {"autoscaling_config": {"min_replicas": num_replicas, **autoscaling}}
    block_size = spec.fields.get("block_size", DEFAULT_BLOCK_SIZE)
    router = RequestRouterConfig(
        request_router_class=PrefixRouter, request_router_kwargs={"block_size": block_size}
    )
    deployment = serve.deployment(
        Replica,
        name=NAME,
        max_ongoing_requests=MAX_ONGOING,  # requests wait in the engine
        ray_actor_options={"num_cpus": 1, "num_gpus": 1 if has_gpus else 0},
        request_router_config=router,
        max_constructor_retry_count=1,
        logging_config=QUIET,
        health_check_period_s=1.0,
        graceful_shutdown_timeout_s=DRAIN_SECONDS,
        **number,
    )
    try:
        return serve.run(deployment.bind(spec), name=NAME, route_prefix=None)
    except RuntimeError as error:
        said = serve.status().applications[NAME].deployments[NAME].message
        if refusals := re.findall(r"\bInputError: (.*)$", said, flags=re.M):
            raise InputError(f"the replicas did not start: {refusals[-1]}") from None
        raise RuntimeError(f"the replicas did not start: {said}") from error
