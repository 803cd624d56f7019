"""M5's engine: M4's schedule on the fused decoder, one step ahead of the tokens."""

from __future__ import annotations

import functools
import gc
import time
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

import m4_prefix_chunked
from m3_paged.block_cache import BlockCache
from m3_paged.scheduler import PagedStepPlan
from milestone_llm.engine.plan import StepPlan
from milestone_llm.engine.request import Request, RequestOutput
from milestone_llm.models.checkpoint import DEFAULT_MODEL
from milestone_llm.trace.tracer import BatchRow

from .config import EngineConfig
from .decoder import FusedDecoder
from .decoder_config import FAMILIES
from .hf_runner import HFRunner
from .runner import FusedRunner, LaunchedStep, needs_host_sampling
from .scheduler import Scheduler


@dataclass
class StepInFlight:
    """A step that was launched and whose tokens have not been read."""

    plan: PagedStepPlan
    sampling: list[bool]
    """For each row of the plan, whether it samples."""
    launched: LaunchedStep
    times: list[float]


class LLMEngine(m4_prefix_chunked.LLMEngine):
    """Triton kernels, CUDA graphs and pipelined steps under M4's schedule.

    A fused decoder takes over the weights of a model that the engine loads itself; a ready model
    passed in keeps its own, and the decoder a copy.
    """

    milestone: ClassVar[str] = "m5_kernels"
    config_class: ClassVar[type[m4_prefix_chunked.EngineConfig]] = EngineConfig

    def __init__(self, model: Any = DEFAULT_MODEL, **options: Any) -> None:
        self._owns_model = not isinstance(model, PreTrainedModel)
        self._in_flight: StepInFlight | None = None
        self._host_paced: set[str] = set()  # requests whose tokens the host must know at once
        super().__init__(model, **options)

    def build_scheduler(self) -> Scheduler:
        """M4's schedule, able to plan ahead."""
        _freeze_what_stays()
        self.decoder: FusedDecoder | None = None
        if self.model.config.model_type in FAMILIES:
            self.decoder = FusedDecoder.from_hf(
                self.model, max_positions=self.max_model_len, consume=self._owns_model
            )
        num_blocks = self._num_kv_blocks()
        return Scheduler(self.config, self.max_model_len, num_blocks)

    def build_runner(self) -> Any:
        """The fused decoder's runner, or Hugging Face's modules with our attention."""
        cache = BlockCache(
            self.model,
            self.scheduler.num_blocks,
            self.config.block_size,
            num_host_blocks=self.scheduler.host.pool.num_blocks,
        )
        return self._runner_over(cache)

    def _runner_over(self, cache: BlockCache) -> FusedRunner | HFRunner:
        if self.decoder is None:
            return HFRunner(self.model, cache)
        return FusedRunner(self.decoder, cache, self.config, self.max_model_len)

    def _run_once(self, cache: BlockCache, plan: PagedStepPlan) -> None:
        self._runner_over(cache).execute(plan)

    @property
    def is_pipelined(self) -> bool:
        """Whether the next step may be launched before the tokens of the last are known."""
        self._host_paced &= self.requests.keys()
        return (
            self.decoder is not None
            and self.config.async_scheduling
            and not self.config.enforce_eager
            and not self._host_paced
        )

    def _enqueue(self, request: Request) -> None:
        super()._enqueue(request)
        if needs_host_sampling(request):
            self._host_paced.add(request.request_id)

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; None if it is not (or no longer) known."""
        request = self.requests.get(request_id)
        output = super().abort(request_id)
        if request is not None and self.decoder is not None:
            for completion in request.completions:
                self.runner.forget(completion.request_id)
        return output

    # -- the loop ----------------------------------------------------------------------------

    def _step(self) -> list[RequestOutput]:
        if not self.is_pipelined:
            outputs = self._settle()  # the pipeline ran until just now
            return outputs + (super()._step() if self.requests else [])
        times = [time.perf_counter()]
        plan = self.scheduler.schedule()
        times.append(time.perf_counter())
        self._note_first_scheduled(plan, times[-1])
        step = self._launch(plan, times)
        assert step or self._in_flight, "unfinished requests, but no step to compute or under way"
        try:
            outputs = self._settle()
        except BaseException:
            if step is not None:
                self._fail(step.plan, step.times)
            raise
        if step is not None:
            self.scheduler.expect(step.plan, step.sampling)
            self._in_flight = step
        if not self.requests:  # what is under way is for nobody
            outputs += self._settle()
        return outputs

    def _launch(self, plan: PagedStepPlan, times: list[float]) -> StepInFlight | None:
        """Start a step; None if the plan has nothing to do."""
        if not plan.rows and not plan.preempted:
            return None
        sampling = [row.samples for row in plan.rows]
        try:
            launched = self.runner.launch(plan)
        except BaseException:
            try:
                self._undelivered += self._settle()  # the step before is as good as ever
            finally:
                self._fail(plan, times)
            raise
        if self.tracer is not None:  # block tables as they were now
            for row in plan.rows:
                row.blocks = list(row.blocks)
        return StepInFlight(plan, sampling, launched, times)

    def _settle(self) -> list[RequestOutput]:
        """Wait for the step under way, if any, and take in its tokens."""
        step, self._in_flight = self._in_flight, None
        if step is None:
            return []
        try:
            sampled = self.runner.collect(step.launched)
        except BaseException:
            self._fail(step.plan, step.times)
            raise
        step.times.append(time.perf_counter())
        outputs: list[RequestOutput] = self.scheduler.settle(step.plan, step.sampling, sampled)
        step.times.append(time.perf_counter())
        self._close_step(step.plan, self._trace_rows(step.plan, sampled), step.times)
        return outputs

    def _fail(self, plan: PagedStepPlan, times: list[float]) -> None:
        """End the requests of a step that raised."""
        self._undelivered += self.scheduler.fail(plan)
        times += [time.perf_counter()] * (4 - len(times))
        self._close_step(plan, self._trace_rows(plan, {}), times)

    def _close_step(self, plan: StepPlan, rows: list[BatchRow], times: list[float]) -> None:
        """As before; and the rows of requests that no longer run are given back."""
        super()._close_step(plan, rows, times)
        if self.decoder is not None:
            running = {request.request_id for request in self.scheduler.running}
            for request_id in self.runner.row_of.keys() - running:
                self.runner.forget(request_id)


@functools.cache
def _freeze_what_stays() -> None:
    """Keep the garbage collector away from what torch, transformers and the model brought, once.

    It would look through all of that now and then, which stops the engine for some 0.2 s.
    """
    gc.collect()
    gc.freeze()
