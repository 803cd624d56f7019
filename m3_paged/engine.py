"""M3's engine: the step loop over paged KV memory, with several completions of one prompt."""

from __future__ import annotations

from milestone_llm.engine.engine import BaseEngine
from milestone_llm.engine.plan import StepPlan
from milestone_llm.models.support import check_flat
from milestone_llm.trace.tracer import Tracer

from .block_cache import BlockCache
from .config import EngineConfig
from .kv_memory import num_kv_blocks, with_swap_space
from .runner import ModelRunner
from .scheduler import Scheduler


class LLMEngine(BaseEngine):
    """Continuous batching over KV blocks."""

    milestone = "m3_paged"
    config_class = EngineConfig
    check_model = staticmethod(check_flat)
    open_trace = staticmethod(Tracer.from_option)
    config: EngineConfig
    scheduler: Scheduler

    def build_scheduler(self) -> Scheduler:
        """Scheduling by blocks."""
        num_blocks = num_kv_blocks(self.model, self.config, self.max_model_len, self._run_once)
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
