"""M5's engine: M4's scheduler over the fused decoder, one step ahead of the tokens.

    host   | plan n+1 | launch n+1 | tokens of n: settle n | plan n+2 | launch n+2 | ...
    device |    step n ............|  step n+1 ...................................

The schedule is M4's: a request knows that a token of a launched step is on its way. One that turns
out to have finished (EOS, a stop string) may have a row in the step that runs by then; what that
row computes is dropped. One that reaches its length is known beforehand and gets no such row.
"""

from __future__ import annotations

from transformers import PreTrainedModel

from m3_paged.block_cache import BlockCache
from m3_paged.kv_memory import num_kv_blocks, with_swap_space
from m4_prefix_chunked.engine import USEFUL_KV
from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.engine.engine import BaseEngine
from milestone_llm.engine.outbox import Reader
from milestone_llm.engine.plan import StepPlan
from milestone_llm.engine.request import Request
from milestone_llm.models.checkpoint import DEFAULT_MODEL
from milestone_llm.models.support import check_flat
from milestone_llm.trace.tracer import Tracer

from .config import EngineConfig
from .decoder import FusedDecoder
from .decoder_config import is_fusible
from .hf_runner import HFRunner
from .runner import FusedRunner
from .sampler import is_host_paced


class LLMEngine(BaseEngine):
    """Triton kernels, CUDA graphs and pipelined steps under M4's schedule.

    A fused decoder takes over the weights of a model that the engine loads itself; a ready model
    passed in keeps its own, and the decoder a copy.
    """

    milestone = "m5_kernels"
    config_class = EngineConfig
    check_model = staticmethod(check_flat)
    open_trace = staticmethod(Tracer.from_option)
    config: EngineConfig
    scheduler: Scheduler

    def __init__(self, model: str | PreTrainedModel = DEFAULT_MODEL, **options: object) -> None:
        self._owns_model = not isinstance(model, PreTrainedModel)
        self._host_paced: set[str] = set()  # requests whose tokens the host must know at once
        super().__init__(model, **options)

    def build_scheduler(self) -> Scheduler:
        """M4's schedule. The decoder comes first: KV memory gets what its weights leave."""
        self.decoder: FusedDecoder | None = None
        if is_fusible(self.model.config):
            self.decoder = FusedDecoder.from_hf(
                self.model, max_positions=self.max_model_len, consume=self._owns_model
            )
        num_blocks = num_kv_blocks(
            self.model, self.config, self.max_model_len, self._run_once, USEFUL_KV
        )
        self.config = with_swap_space(self.config, self.model, num_blocks)
        return Scheduler(self.config, self.max_model_len, num_blocks)

    def build_runner(self) -> FusedRunner | HFRunner:
        """The fused decoder's runner, or Hugging Face's modules with our attention."""
        num_blocks, num_host_blocks = self.scheduler.num_blocks, self.scheduler.num_host_blocks
        cache = BlockCache(self.model, num_blocks, self.config.block_size, num_host_blocks)
        return self._runner_over(cache)

    def _runner_over(self, cache: BlockCache) -> FusedRunner | HFRunner:
        if self.decoder is None:
            return HFRunner(self.model, cache)
        return FusedRunner(self.decoder, cache, self.config, self.max_model_len)

    def _run_once(self, cache: BlockCache, plan: StepPlan) -> None:
        runner = self._runner_over(cache)
        runner.collect(runner.launch(plan))

    @property
    def num_steps_ahead(self) -> int:
        """1 where the next step may be launched before the tokens of the last are known."""
        self._host_paced = {
            request_id
            for request_id in self._host_paced & self.requests.keys()
            if is_host_paced(self.requests[request_id])
        }
        is_pipelined = (
            self.decoder is not None
            and self.config.async_scheduling
            and not self.config.enforce_eager
            and not self._host_paced
        )
        return int(is_pipelined)

    def _enqueue(self, requests: list[Request], reader: Reader | None) -> None:
        self._host_paced |= {each.request_id for each in requests if is_host_paced(each)}
        super()._enqueue(requests, reader)

    def warm_up(self) -> None:
        """Compile kernels and capture CUDA graphs before anybody waits for them."""
        super().warm_up()
        if isinstance(self.runner, FusedRunner):
            self.runner.capture_graphs()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. False, with nothing done, while blocks are in use."""
        return self.scheduler.reset_prefix_cache()
