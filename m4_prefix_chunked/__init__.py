"""M4: prefix caching and chunked prefill, two independent switches over M3.

What changes from M3: the KV manager finds the KV of equal prompt beginnings by content hash, and
the scheduler divides a budget of tokens among rows, so that a long prompt is computed in chunks
beside the decode rows of others. The runner and attention are M3's.
"""

from typing import TYPE_CHECKING

from m1_single import RequestOutput, SamplingParams
from milestone_llm.lazy import lazy

from .config import EngineConfig

if TYPE_CHECKING:
    from .engine import LLMEngine

__all__ = ["EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]
__getattr__ = lazy(__name__, LLMEngine=".engine")

__path__.append(
    f"{__path__[0]}/tools"
)  # instruments run by short names: `python -m m4_prefix_chunked.stress`
