"""GPUs and models to choose from, and the machine that a pair of them is.

Of an H200 the playground's formula knows what was measured: reading at 92 % of the data sheet's
bandwidth, prompts at 42 % of its operations. The other GPUs are taken to reach the same shares, and
the same time for launches and Python. That is an assumption: none of them was measured.
"""

from __future__ import annotations

from dataclasses import dataclass

from milestone_llm.core.errors import InputError

from .machine import MACHINES, Machine

MEASURED = MACHINES["h200"]


@dataclass(frozen=True)
class GPU:
    """A data sheet: memory in bytes, bytes a second, operations a second in bfloat16 without
    sparsity."""

    title: str
    memory: float
    bandwidth: float
    operations: float
    bus: float
    """Bytes a second to host memory in one direction."""
    source: str


@dataclass(frozen=True)
class Shape:
    """A dense decoder, from its published config."""

    title: str
    layers: int
    hidden: int
    query_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    is_tied: bool = False
    """The LM head is the embedding."""

    @property
    def layer_weights(self) -> int:
        """Weights of all layers' matrices: query, key, value, output, gate, up, down."""
        heads = 2 * self.query_heads + 2 * self.kv_heads
        return self.layers * self.hidden * (heads * self.head_dim + 3 * self.intermediate)

    @property
    def head_weights(self) -> int:
        """Weights of the LM head."""
        return self.hidden * self.vocabulary

    @property
    def weights(self) -> int:
        """All weights that memory holds."""
        return self.layer_weights + self.head_weights * (1 if self.is_tied else 2)

    @property
    def query_size(self) -> int:
        """Numbers of a token's queries, in all layers."""
        return self.layers * self.query_heads * self.head_dim

    @property
    def kv_numbers(self) -> int:
        """Numbers of a token's keys and values, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim


GPUS = {  # memory, bandwidth, operations, bus: each maker's data sheet
    "l4": GPU("L4", 24e9, 300e9, 121e12, 25e9, "NVIDIA L4 data sheet"),
    "rtx4090": GPU("RTX 4090", 24e9, 1008e9, 165.2e12, 25e9, "NVIDIA Ada GPU architecture paper"),
    "l40s": GPU("L40S", 48e9, 864e9, 362.05e12, 25e9, "NVIDIA L40S data sheet"),
    "a100": GPU("A100 SXM", 80e9, 2039e9, 312e12, 25e9, "NVIDIA A100 data sheet"),
    "h100": GPU("H100 SXM", 80e9, 3.35e12, 989e12, 50e9, "NVIDIA H100 data sheet"),
    "h200": GPU("H200 SXM", 141e9, 4.8e12, 989e12, 50e9, "NVIDIA H200 data sheet"),
    "mi300x": GPU("MI300X", 192e9, 5.3e12, 1307.4e12, 50e9, "AMD MI300X data sheet"),
}
MODELS = {
    "qwen3-0.6b": Shape("Qwen3-0.6B", 28, 1024, 16, 8, 128, 3072, 151_936, is_tied=True),
    "llama-3.1-8b": Shape("Llama-3.1-8B", 32, 4096, 32, 8, 128, 14_336, 128_256),
    "qwen3-8b": Shape("Qwen3-8B", 36, 4096, 32, 8, 128, 12_288, 151_936),
    "qwen3-32b": Shape("Qwen3-32B", 64, 5120, 64, 8, 128, 25_600, 151_936),
    "llama-3.3-70b": Shape("Llama-3.3-70B", 80, 8192, 64, 8, 128, 28_672, 128_256),
}
MEMORY_SHARE = MEASURED.memory / GPUS["h200"].bandwidth
ARITHMETIC_SHARE = MEASURED.arithmetic / GPUS["h200"].operations


def gpu_machine(gpu: str, model: str, weight_bytes: float = 2, kv_bytes: float = 2) -> Machine:
    """Return a model on a GPU.

    Args:
        weight_bytes: of one weight.
        kv_bytes: of one number of a key or a value.
    """
    card, shape = GPUS[gpu], MODELS[model]
    return Machine(
        title=f"{card.title}, {shape.title}, {weight_bytes:g} bytes a weight",
        layer_weights=shape.layer_weights,
        head_weights=shape.head_weights,
        query_size=shape.query_size,
        weight_bytes=weight_bytes,
        kv_bytes=int(shape.kv_numbers * kv_bytes),
        overhead_s=MEASURED.overhead_s,
        memory=MEMORY_SHARE * card.bandwidth,
        arithmetic=ARITHMETIC_SHARE * card.operations,
        bus=card.bus,
    )


def machine_named(name: str) -> Machine:
    """Return a machine of `MACHINES`, or "GPU model bytes-a-weight bytes-a-KV-number".

    Raises:
        InputError: there is none of this name.
    """
    if name in MACHINES:
        return MACHINES[name]
    try:
        gpu, model, *sizes = name.split()
        return gpu_machine(gpu, model, *map(float, sizes))
    except (KeyError, TypeError, ValueError):
        listed = ", ".join([*MACHINES, '"h100 qwen3-8b 2 2"'])
        raise InputError(f"machine must be one of {listed}, got {name!r}") from None
