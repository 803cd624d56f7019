"""M1: static batching on an unchanged Hugging Face model.

from m1_single import LLMEngine, SamplingParams
engine = LLMEngine("smollm2-135m")
print(engine.generate("What is the capital of France?", chat=True)[0].text)
"""

from typing import TYPE_CHECKING

from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.config import EngineConfig
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.lazy import lazy
from milestone_llm.structured.params import StructuredOutputsParams

if TYPE_CHECKING:
    from .engine import LLMEngine

    LLM = LLMEngine

__all__ = [
    "LLM",
    "EngineConfig",
    "LLMEngine",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]
__getattr__ = lazy(__name__, LLMEngine=".engine")
