"""M5: Triton kernels, a fused decoder, CUDA graphs and pipelined steps under M4's scheduler.

What changes from M4: how a step is computed. State lives on the device, a decode step is one CUDA
graph from metadata to sampled token, and the host plans a step while the one before still runs.
Schedule, cache and tokens are M4's.

Read from the inside out. Five files go from the model to the kernel; the rest is around them:

    decoder/decoder        the forward: a layer in nine launches
    decoder/ops            the table of what it launches
    decoder/linear         of these, the products with weights
    decoder/attention      and attention: which kernel for which tokens of a step
    kernels/flash_decode   the kernel for decode rows (`kernels` has simpler ones to begin with)
    device_step            a step on the device: metadata, forward, sampler, tokens appended
    device_state, sampler  what the device stores of each request; from logits to tokens
    runner, to_host        the host: what it tells the device, and how it gets tokens back
    step_graphs            a step as one CUDA graph
    engine, backends       last: how all of this is put together, and what takes the place of what

`python -m m5_kernels.walkthrough` begins in the forward, too, in a debugger.

The files of extras/ and tools/ need not be opened to understand M5. Extras are objects that take
the place of the lesson's (`backends` chooses them); tools measure.
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
