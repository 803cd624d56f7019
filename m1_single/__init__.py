"""M1: static batching on an unchanged Hugging Face model.

from m1_single import LLMEngine, SamplingParams
engine = LLMEngine("smollm2-135m")
print(engine.generate("What is the capital of France?", chat=True)[0].text)
"""

from milestone_llm.engine.config import EngineConfig
from milestone_llm.engine.outputs import RequestOutput
from milestone_llm.engine.sampling_params import SamplingParams

from .engine import LLMEngine

__all__ = ["EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]
__path__.append(f"{__path__[0]}/tools")  # instruments: `python -m m1_single.timeline`
