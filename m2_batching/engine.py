"""M2's engine: the loop of M1 with another scheduler and another runner."""

from __future__ import annotations

from typing import ClassVar

import m1_single

from .config import EngineConfig
from .runner import ModelRunner
from .scheduler import Scheduler
from .slot_cache import SlotCache


class LLMEngine(m1_single.LLMEngine):
    """Continuous batching over one contiguous KV slot a request."""

    milestone: ClassVar[str] = "m2_batching"
    config_class: ClassVar[type[m1_single.EngineConfig]] = EngineConfig

    def build_scheduler(self) -> Scheduler:
        """Iteration-level scheduling."""
        return Scheduler(self.config, self.max_model_len)

    def build_runner(self) -> ModelRunner:
        """Selective batching."""
        cache = SlotCache(self.model, self.config.max_num_seqs, self.max_model_len)
        return ModelRunner(self.model, cache)
