"""What M5 adds to the configuration: two switches, GPUs that share a model, bits of a weight."""

from __future__ import annotations

from dataclasses import dataclass

import m4_prefix_chunked.config
from milestone_llm.core.errors import InputError


@dataclass(frozen=True)
class EngineConfig(m4_prefix_chunked.config.EngineConfig):
    """Limits and switches of the engine with its own kernels."""

    enforce_eager: bool = False
    """Launch every kernel of every step: no CUDA graphs, no pipelined steps."""
    async_scheduling: bool = True
    """Plan and launch a step before the tokens of the one before have come back."""
    tensor_parallel_size: int = 1
    """GPUs over which every layer is cut, a process each: start the program with
    `torchrun --standalone --nproc-per-node N`."""
    quantization: str | None = None
    """"int8": matrices of weights are rounded to integers of eight bits when they are loaded, with
    a scale a row: half the memory of bfloat16. For the families of the fused decoder. None: they
    stay as they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_parallel_size < 1:
            raise InputError(
                f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}"
            )
        if self.quantization not in (None, "int8"):
            raise InputError(f'quantization must be "int8" or None, got {self.quantization!r}')
