"""What M5 adds to the configuration: graphs, pipelined steps, tensor parallelism, quantization."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import m4_prefix_chunked.config
from milestone_llm.core.errors import InputError


@dataclass(frozen=True)
class EngineConfig(m4_prefix_chunked.config.EngineConfig):
    """Settings of the engine with its own kernels, in addition to M4's."""

    enforce_eager: bool = False
    """Launch every kernel of every step: no CUDA graphs, no pipelined steps."""
    async_scheduling: bool | None = None
    """Plan and launch a step before the tokens of the step before have come back. None: True,
    except on a CPU. A CPU computes a step while it launches it, so tokens would only come a step
    later."""
    tensor_parallel_size: int = 1
    """Number of GPUs over which every layer is cut, with one process for each. Start the program
    with `torchrun --standalone --nproc-per-node N`."""
    quantization: str | None = None
    """"int8": weights of linear layers are rounded to 8-bit integers when they are loaded, with one
    scale a row. That is half the memory of bfloat16. "fp8": they are rounded to e4m3, with one
    scale a matrix. Where a step has several tokens, their activations are rounded too, since tensor
    cores multiply such numbers twice as fast. "gguf": on a CPU, the weights of a GGUF file stay in
    the 4, 5 or 8 bits that they have there; others are rounded to 8. All are for the families of
    the fused decoder, and in bfloat16 unless `dtype` says otherwise. None: weights have the model's
    dtype."""
    kv_cache_dtype: str = "auto"
    """"fp8": keys and values are rounded to e4m3, so that memory holds twice the tokens, and less
    is read. "auto": they have the model's dtype."""
    batch_invariant: bool = False
    """Compute every sum in an order that depends on its request alone. Then tokens and
    log-probabilities of a request have the same bits alone and in any batch. It costs speed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_cache_dtype not in ("auto", "fp8"):
            raise InputError(f'kv_cache_dtype must be "auto" or "fp8", got {self.kv_cache_dtype!r}')
        if self.tensor_parallel_size < 1:
            raise InputError(
                f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}"
            )
        if self.quantization not in (None, "int8", "fp8", "gguf"):
            raise InputError(
                f'quantization must be "int8", "fp8", "gguf" or None, got {self.quantization!r}'
            )
        if self.quantization == "fp8" and self.tensor_parallel_size > 1:
            raise InputError('quantization="fp8" takes whole matrices: tensor_parallel_size is 1')
        if self.quantization == "gguf" and self.tensor_parallel_size > 1:
            raise InputError('quantization="gguf" takes whole matrices: tensor_parallel_size is 1')
        if self.batch_invariant and self.quantization is not None:
            name = f'quantization="{self.quantization}"'
            raise InputError(f"batch_invariant=True: sums of {name} depend on the batch")
        if self.batch_invariant and self.tensor_parallel_size > 1:
            raise InputError(
                f"batch_invariant=True: sums over tensor_parallel_size={self.tensor_parallel_size} "
                "GPUs depend on the batch"
            )

    @property
    def kv_dtype(self) -> str | None:
        """The name of torch's dtype for keys and values; None: the model's."""
        return "float8_e4m3fn" if self.kv_cache_dtype == "fp8" else None

    def on_device(self, device_type: str, given: Collection[str]) -> EngineConfig:
        """Fill in what the user left open: M4's fields, and `async_scheduling` (not on a CPU)."""
        config = super().on_device(device_type, given)
        if config.async_scheduling is None:
            config = replace(config, async_scheduling=device_type != "cpu")
        return config
