"""M1: static batching on an unchanged Hugging Face model, and the step loop all milestones share.

from m1_single import LLMEngine, SamplingParams
engine = LLMEngine("smollm2-135m")
print(engine.generate("What is the capital of France?", chat=True)[0].text)
"""

from typing import TYPE_CHECKING

from milestone_llm.engine.config import EngineConfig
from milestone_llm.engine.request import RequestOutput
from milestone_llm.engine.sampling_params import SamplingParams
from milestone_llm.lazy import lazy

if TYPE_CHECKING:
    from milestone_llm.engine.engine import LLMEngine

__all__ = ["EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]
__getattr__ = lazy(__name__, LLMEngine="milestone_llm.engine.engine")

__path__.append(
    f"{__path__[0]}/tools"
)  # instruments run by short names: `python -m m1_single.timeline`
