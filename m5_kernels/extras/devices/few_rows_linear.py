"""Linear layers of few rows, faster than the library's: when each kernel is used.

    weight                     tokens   kernel
    small, of 16 bits          1..16    register_linear: loads all of it at once (from Hopper on)
    small, in bf16             17..256  hopper_linear: loads it early (on Hopper)
    of 16 bits                 2..16    dot_linear: tensor cores, by shared memory; also 1 token
                                        where many rows are short

Each kernel sums all tokens in the same way. So a token gets the same bits alone and together with
others, if the number of tokens does not change the kernel.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from m5_kernels.decoder.linear import LinearMethod, LinearWeight, Weight
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import supports_pdl
from m5_kernels.kernels.triton_or_twin import HAS_TRITON, INTERPRETED

from .dot_linear import dot_linear
from .few_rows_tiles import SHORT_ROW
from .hopper_device import fits_copy_engine, is_hopper
from .register_linear import MAX_TOKENS, fits_registers, register_linear

MAX_HOPPER_TOKENS = 256
"""Up to so many tokens the library takes longer than `hopper_linear`, measured on an H200."""


@dataclass(frozen=True)
class FewRowsLinear(LinearMethod):
    """Linear layers with weights of the model's dtype, by the first of these kernels that fits."""

    has_register: bool = False
    """Whether there is `register_linear`, which prefetches weights before it waits (PDL)."""
    has_hopper: bool = False
    has_dot: bool = False
    may_start_early: bool = True

    @classmethod
    def on(cls, device: torch.device, may_start_early: bool = True) -> FewRowsLinear:
        """Return an object with the kernels that this GPU supports."""
        return cls(
            has_register=supports_pdl(device),
            has_hopper=is_hopper(device),
            has_dot=HAS_TRITON and (device.type == "cuda" or INTERPRETED),
            may_start_early=may_start_early,
        )

    def apply(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return `hidden @ weight.T + bias`."""
        if self.has_register and should_use_registers(len(hidden), weight):
            return register_linear(hidden, weight, bias, launch=launch)
        if self.has_hopper and should_use_hopper(hidden, weight, len(weight)):
            from .hopper_linear import hopper_linear  # Gluon: NVIDIA's GPUs alone

            return hopper_linear(hidden, weight, bias, launch=launch)
        if self.has_dot and should_use_dot(len(hidden), weight):
            return dot_linear(hidden, weight, bias, launch=launch)
        return super().apply(hidden, weight, bias, launch)

    def gate_up(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return silu(gate) * up of what `apply` returns."""
        if self.has_register and should_use_registers(len(hidden), weight):
            return register_linear(hidden, weight, bias, is_gated=True, launch=launch)
        if self.has_hopper and should_use_hopper(hidden, weight, len(weight) // 2):
            from .hopper_linear import hopper_linear  # Gluon: NVIDIA's GPUs alone

            return hopper_linear(hidden, weight, bias, is_gated=True, launch=launch)
        if self.has_dot and should_use_dot(len(hidden), weight):
            return self.activate(dot_linear(hidden, weight, bias, launch=launch), launch)
        return super().gate_up(hidden, weight, bias, launch)

    def starts_early(self, num_tokens: int, weight: Weight) -> bool:
        """Return whether layers read weights before they wait: `register_linear`, and with one
        token all that are used."""
        return self.may_start_early and (
            num_tokens == 1 or should_use_registers(num_tokens, weight)
        )

    def token_counts(self, max_tokens: int, weights: Sequence[LinearWeight]) -> Iterable[int]:
        """Return where the tiles of `hopper_linear` change, and where the library takes over."""
        return (128, 192, MAX_HOPPER_TOKENS, MAX_HOPPER_TOKENS + 1) if self.has_hopper else ()


def should_use_registers(num_tokens: int, weight: torch.Tensor) -> bool:
    """Return whether to use `register_linear`: tokens are few, and registers hold the weight."""
    is_right = weight.element_size() == 2 and fits_registers(*weight.shape)
    return is_right and 1 <= num_tokens <= MAX_TOKENS


def should_use_hopper(hidden: torch.Tensor, weight: torch.Tensor, num_outputs: int) -> bool:
    """Return whether to use `hopper_linear` for these rows. Larger weights the library reads as
    fast.

    Rows must be aligned for the copy engine.
    """
    out_size, in_size = weight.shape
    if not MAX_TOKENS < len(hidden) <= MAX_HOPPER_TOKENS:
        return False
    return fits_registers(out_size, in_size) and fits_copy_engine(hidden, in_size, num_outputs)


def should_use_dot(num_tokens: int, weight: torch.Tensor) -> bool:
    """Return whether `dot_linear` was the fastest on an H200 with Qwen3's shapes.

    With many short rows each program of `skinny_linear` has too little work.
    """
    has_short_rows = weight.shape[1] <= SHORT_ROW and len(weight) >= 4096
    fewest = 1 if has_short_rows else 2
    return weight.element_size() == 2 and fewest <= num_tokens <= MAX_TOKENS
