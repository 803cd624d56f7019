"""M5's engine: M4's schedule on the fused decoder, one step ahead of the tokens."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import PreTrainedModel

import m4_prefix_chunked
from m1_single.request import Request, RequestOutput
from m1_single.tracer import BatchRow
from m3_paged.block_cache import BlockCache
from m3_paged.scheduler import PagedStepPlan

from .config import EngineConfig
from .decoder import FAMILIES, FusedDecoder
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

    def __init__(self, model: Any = m4_prefix_chunked.DEFAULT_MODEL, **options: Any) -> None:
        self._owns_model = not isinstance(model, PreTrainedModel)
        self._in_flight: StepInFlight | None = None
        self._host_paced: set[str] = set()  # requests whose tokens the host must know at once
        super().__init__(model, **options)

    def build_scheduler(self) -> Scheduler:
        """M4's schedule, able to plan ahead."""
        self.decoder: FusedDecoder | None = None
        if self.model.config.model_type in FAMILIES:
            self.decoder = FusedDecoder.from_hf(
                self.model, max_positions=self.max_model_len, consume=self._owns_model
            )
        num_blocks = self._num_kv_tokens() // self.config.block_size
        return Scheduler(self.config, self.max_model_len, num_blocks)

    def build_runner(self) -> FusedRunner | HFRunner:
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
        self._note_first_scheduled(plan)
        before = self._in_flight
        step: StepInFlight | None = None
        if plan.rows or plan.preempted:
            sampling = [row.samples for row in plan.rows]
            try:
                step = StepInFlight(plan, sampling, self.runner.launch(plan), times)
            except BaseException:
                self._fail(plan, times)
                raise
        assert step or before, "unfinished requests, but nothing to compute and nothing under way"
        outputs = self._settle()
        if step is not None:
            self.scheduler.expect(step.plan, step.sampling)
            self._in_flight = step
        return outputs

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
        rows = self._trace_rows(step.plan, sampled, step.sampling)
        outputs = self.scheduler.settle(step.plan, step.sampling, sampled)
        step.times.append(time.perf_counter())
        self._close_step(step.plan, rows, step.times)
        return outputs
