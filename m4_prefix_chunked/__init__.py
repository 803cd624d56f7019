"""M4: prefix caching and chunked prefill, two independent switches over M3.

What changes from M3: a cache finds the KV of equal prompt beginnings by content hash, and the
scheduler divides a budget of tokens among rows, so that a long prompt is computed in chunks, in the
same steps as the decode rows of others. Block tables, runner and attention are M3's.
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
