"""M1's engine: the step loop over static batches."""

from __future__ import annotations

from milestone_llm.engine.config import EngineConfig
from milestone_llm.engine.engine import BaseEngine
from milestone_llm.models.support import check_padded
from milestone_llm.trace.tracer import Tracer

from .runner import ModelRunner
from .scheduler import Scheduler


class LLMEngine(BaseEngine):
    """Static batching on an unchanged Hugging Face model."""

    milestone = "m1_single"
    config_class = EngineConfig
    check_model = staticmethod(check_padded)
    open_trace = staticmethod(Tracer.from_option)

    def build_scheduler(self) -> Scheduler:
        """A batch at a time."""
        return Scheduler(self.config, self.max_model_len)

    def build_runner(self) -> ModelRunner:
        """The model with its own attention and `past_key_values`."""
        return ModelRunner(self.model)
