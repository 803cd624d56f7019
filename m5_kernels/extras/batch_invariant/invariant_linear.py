"""Linear layers whose rows have the same bits, however many there are.

    weight              tokens    kernel
    small, in bf16      1..256    hopper_linear, on Hopper: loads the weight early
    others              any       tiled_linear

Both multiply by the same instruction, and take the inputs from first to last. A test on a GPU holds
that they agree bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from m5_kernels.decoder.linear import LinearMethod, LinearWeight, Weight
from m5_kernels.extras.devices.few_rows_linear import MAX_HOPPER_TOKENS
from m5_kernels.extras.devices.hopper_device import fits_copy_engine, is_hopper
from m5_kernels.extras.devices.register_linear import MAX_TOKENS, fits_registers
from m5_kernels.kernels.launch import PLAIN, Launch
from milestone_llm.core.errors import InputError

from .tiled_linear import tiled_linear

COPIED_BYTES = 16
"""The copy engine moves so many bytes at a time."""


@dataclass(frozen=True)
class InvariantLinear(LinearMethod):
    """Linear layers with weights of the model's dtype."""

    has_hopper: bool = False

    @classmethod
    def on(cls, device: torch.device) -> InvariantLinear:
        """Return an object with the kernels that this GPU supports."""
        return cls(has_hopper=is_hopper(device))

    def create(
        self, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> Weight:
        """Return memory for a weight, not yet filled.

        Raises:
            InputError: rows of the weight cannot be copied.
        """
        if in_size * dtype.itemsize % COPIED_BYTES:
            raise InputError(
                f"batch_invariant=True: rows of {in_size} numbers are no multiple of 16 bytes"
            )
        return super().create(out_size, in_size, dtype, device)

    def apply(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return `hidden @ weight.T + bias`."""
        if not launch.runs_triton(hidden):
            return super().apply(hidden, weight, bias, launch)
        if self.has_hopper and should_use_hopper(hidden, weight, len(weight)):
            from m5_kernels.extras.devices.hopper_linear import hopper_linear  # Gluon

            return hopper_linear(hidden, weight, bias, launch=launch)
        return tiled_linear(hidden, weight, bias, launch=launch)

    def gate_up(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return silu(gate) * up of what `apply` returns."""
        if not launch.runs_triton(hidden):
            return super().gate_up(hidden, weight, bias, launch)
        if self.has_hopper and should_use_hopper(hidden, weight, len(weight) // 2):
            from m5_kernels.extras.devices.hopper_linear import hopper_linear  # Gluon

            return hopper_linear(hidden, weight, bias, is_gated=True, launch=launch)
        return self.activate(tiled_linear(hidden, weight, bias, launch=launch), launch)

    def starts_early(self, num_tokens: int, weight: Weight) -> bool:
        """Return whether the layers of such a step load their weights before they wait."""
        return self.has_hopper and num_tokens <= MAX_TOKENS and fits_registers(*weight.shape)

    def token_counts(self, max_tokens: int, weights: Sequence[LinearWeight]) -> Iterable[int]:
        """Return numbers of tokens between which tiles change."""
        return (64, 65, 128, 192, 256, 257, 384, 512, 768, 1024, 1536, 2048)


def should_use_hopper(hidden: torch.Tensor, weight: torch.Tensor, num_outputs: int) -> bool:
    """Return whether to use `hopper_linear` for these rows."""
    out_size, in_size = weight.shape
    is_small = 1 <= len(hidden) <= MAX_HOPPER_TOKENS and fits_registers(out_size, in_size)
    return is_small and fits_copy_engine(hidden, in_size, num_outputs)
