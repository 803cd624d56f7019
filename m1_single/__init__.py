"""M1: static batching on an unchanged Hugging Face model, and the step loop all milestones share.

from m1_single import LLMEngine, SamplingParams
engine = LLMEngine("smollm2-135m")
print(engine.generate("What is the capital of France?", chat=True)[0].text)
"""

from .config import EngineConfig
from .engine import LLMEngine
from .request import RequestOutput
from .sampling_params import SamplingParams

__all__ = ["EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]
