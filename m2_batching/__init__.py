"""M2: continuous batching. Running requests are chosen at every step; prefill and decode share it.

What changes from M1: the scheduler (iteration-level, Orca section 3, S1), the runner and the
attention function (selective batching, S2), and KV memory (a contiguous region a request).
"""

from typing import TYPE_CHECKING

from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.lazy import lazy
from milestone_llm.structured.params import StructuredOutputsParams

from .config import EngineConfig

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
