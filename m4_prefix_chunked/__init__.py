"""M4: prefix caching and chunked prefill, two independent switches over M3.

What changes from M3: the KV manager finds the KV of equal prompt beginnings by content hash, and
the scheduler divides a budget of tokens among rows, so that a long prompt is computed in chunks
beside the decode rows of others. The runner and attention are M3's.
"""

from milestone_llm.engine.outputs import RequestOutput
from milestone_llm.engine.sampling_params import SamplingParams

from .config import EngineConfig
from .engine import LLMEngine

__all__ = ["EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]
__path__.append(f"{__path__[0]}/tools")  # instruments: `python -m m4_prefix_chunked.stress`
