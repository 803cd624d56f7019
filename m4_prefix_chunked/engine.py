"""M4's engine: M3's runner under a scheduler that caches prefixes and chunks prompts."""

from __future__ import annotations

from m3_paged.block_cache import BlockCache
from m3_paged.kv_memory import num_kv_blocks, with_swap_space
from m3_paged.runner import ModelRunner
from milestone_llm.engine.engine import BaseEngine
from milestone_llm.engine.plan import StepPlan
from milestone_llm.models.support import check_flat
from milestone_llm.trace.tracer import Tracer

from .config import EngineConfig
from .scheduler import Scheduler

USEFUL_KV = 16
"""KV memory worth having, in full batches: what running requests leave free remembers prefixes."""


class LLMEngine(BaseEngine):
    """Prefix caching and chunked prefill over KV blocks."""

    milestone = "m4_prefix_chunked"
    config_class = EngineConfig
    check_model = staticmethod(check_flat)
    open_trace = staticmethod(Tracer.from_option)
    config: EngineConfig
    scheduler: Scheduler

    def build_scheduler(self) -> Scheduler:
        """Scheduling by blocks and by a token budget."""
        num_blocks = num_kv_blocks(
            self.model, self.config, self.max_model_len, self._run_once, USEFUL_KV
        )
        self.config = with_swap_space(self.config, self.model, num_blocks)
        return Scheduler(self.config, self.max_model_len, num_blocks)

    def build_runner(self) -> ModelRunner:
        """Paged attention."""
        num_blocks, num_host_blocks = self.scheduler.num_blocks, self.scheduler.num_host_blocks
        cache = BlockCache(self.model, num_blocks, self.config.block_size, num_host_blocks)
        return ModelRunner(self.model, cache)

    def _run_once(self, cache: BlockCache, plan: StepPlan) -> None:
        """Compute a plan over some cache, to see how much memory that takes."""
        ModelRunner(self.model, cache).launch(plan)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV, for instance after the weights changed.

        Returns:
            False, with nothing done, while blocks are in use, on the device or by swapped requests
            in host memory: finish or abort the requests first.
        """
        return self.scheduler.reset_prefix_cache()
