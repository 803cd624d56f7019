"""M3: PagedAttention. KV memory in fixed-size blocks, found through block tables.

What changes from M2: the KV manager (blocks with reference counts instead of regions), the
attention function (it reads through block tables), and the scheduler. The scheduler may now admit
more requests than could grow to full length, and preempts when memory runs out. Completions of one
prompt share its blocks.
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
