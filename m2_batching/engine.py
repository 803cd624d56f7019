"""M2's engine: the step loop over continuous batching."""

from __future__ import annotations

from milestone_llm.engine.engine import BaseEngine
from milestone_llm.models.support import check_flat
from milestone_llm.trace.tracer import Tracer

from .config import EngineConfig
from .region_cache import RegionCache
from .runner import ModelRunner
from .scheduler import Scheduler


class LLMEngine(BaseEngine):
    """Continuous batching over one contiguous KV region a request."""

    milestone = "m2_batching"
    config_class = EngineConfig
    check_model = staticmethod(check_flat)
    open_trace = staticmethod(Tracer.from_option)
    config: EngineConfig

    def build_scheduler(self) -> Scheduler:
        """Iteration-level scheduling."""
        return Scheduler(self.config, self.max_model_len)

    def build_runner(self) -> ModelRunner:
        """Selective batching."""
        cache = RegionCache(self.model, self.config.max_num_seqs, self.max_model_len)
        return ModelRunner(self.model, cache)
