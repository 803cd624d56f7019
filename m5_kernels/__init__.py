"""M5: Triton kernels, a fused decoder, CUDA graphs and pipelined steps under M4's scheduler.

What changes from M4: how a step is computed. State lives on the device, a decode step is one CUDA
graph from metadata to sampled token, and the host plans a step while the one before still runs.
Schedule, cache and tokens are M4's.

    engine, runner, device_step    a step, from the plan to the kernels
    device_state, step_graphs      what lives on the device; a step as one graph
    sampler, to_host               from logits to tokens, and to the host
    decoder/, kernels/             the model, and what it launches
    extras/                        the appendix: objects that take the place of the lesson's
"""

from typing import TYPE_CHECKING

from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.frontend.lazy import lazy
from milestone_llm.frontend.outputs import RequestOutput

from .config import EngineConfig

if TYPE_CHECKING:
    from .engine import LLMEngine

__all__ = ["EngineConfig", "LLMEngine", "RequestOutput", "SamplingParams"]
__getattr__ = lazy(__name__, LLMEngine=".engine")
