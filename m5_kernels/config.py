"""What M5 adds to the configuration: two switches, GPUs that share a model, bits of a weight."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace

import m4_prefix_chunked.config
from milestone_llm.core.errors import InputError
from milestone_llm.frontend import config as base


@dataclass(frozen=True)
class EngineConfig(base.EngineConfig):
    """Limits and switches of the engine with its own kernels."""

    # Of m2_batching.
    policy: str = "fcfs"
    aging_seconds: float | None = None

    # Of m3_paged.
    block_size: int = 16
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    preemption: str = "recompute"
    swap_space_tokens: int | None = None

    # Of m4_prefix_chunked.
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    prefill_policy: str = "mixed"
    speculation: str | None = None
    num_speculative_tokens: int = 3
    speculation_max_num_seqs: int | None = None

    enforce_eager: bool = False
    """Launch every kernel of every step: no CUDA graphs, no pipelined steps."""
    async_scheduling: bool | None = None
    """Plan and launch a step before the tokens of the one before have come back. None: except on a
    CPU, which computes a step while it launches it, so that tokens would only come a step later."""
    tensor_parallel_size: int = 1
    """GPUs over which every layer is cut, a process each: start the program with
    `torchrun --standalone --nproc-per-node N`."""
    quantization: str | None = None
    """"int8": matrices of weights are rounded to integers of eight bits when they are loaded, with
    a scale a row: half the memory of bfloat16. "gguf": on a CPU, a GGUF file's matrices stay in the
    four or eight bits that they have there. Both for the families of the fused decoder, and in
    bfloat16 unless `dtype` says otherwise. None: they become numbers of the model's dtype."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.for_scheduler()  # whose checks are M4's
        if self.tensor_parallel_size < 1:
            raise InputError(
                f"tensor_parallel_size must be at least 1, got {self.tensor_parallel_size}"
            )
        if self.quantization not in (None, "int8", "gguf"):
            raise InputError(
                f'quantization must be "int8", "gguf" or None, got {self.quantization!r}'
            )
        if self.quantization == "gguf" and self.tensor_parallel_size > 1:
            raise InputError('quantization="gguf" takes whole matrices: tensor_parallel_size is 1')

    def for_scheduler(self) -> m4_prefix_chunked.config.EngineConfig:
        """M4's scheduler plans the steps, and knows M4's fields."""
        scheduled = m4_prefix_chunked.config.EngineConfig
        return scheduled(**{each.name: getattr(self, each.name) for each in fields(scheduled)})

    @property
    def num_rows_that_guess(self) -> int:
        """Most rows of a step with guesses."""
        return self.for_scheduler().num_rows_that_guess

    def on_device(self, device_type: str, given: Collection[str]) -> EngineConfig:
        """With as many rows, and rows that guess, as pay there, and with pipelined steps where they
        pay, unless somebody has chosen."""
        chosen = self.for_scheduler().on_device(device_type, given)
        is_async = self.async_scheduling
        return replace(
            self,
            max_num_seqs=chosen.max_num_seqs,
            speculation_max_num_seqs=chosen.speculation_max_num_seqs,
            async_scheduling=device_type != "cpu" if is_async is None else is_async,
        )

    def resolve_max_model_len(self, model_max_len: int | None) -> int:
        """The `max_model_len` in force: with chunked prefill, whatever the step's budget."""
        return self.for_scheduler().resolve_max_model_len(model_max_len)
