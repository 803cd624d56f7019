"""Linear layers whose rows have the same bits, however many there are.

    weight                     tokens    kernel                              parts
    small, of 16 bits          1..16     register_linear, on Hopper          of 256 inputs
    small, in bf16             17..256   hopper_linear, on Hopper            of 256 inputs
    small, of 16 bits          others    tiled_linear, on Hopper             of 256 inputs
    long rows, of 16 bits      1..16     dot_linear                          one
    few outputs, in bf16       65..256   hopper_linear, too, with wide tiles one
    others                     any       tiled_linear                        one

All of them take the inputs of a part from first to last, 16 in each instruction, and the parts from
first to last. A test on a GPU holds that they agree bit for bit. Parts make a chain of small layers
short: `register_linear` sums them at the same time. `skinny_linear` and the library do not agree.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from m5_kernels.decoder.linear import LinearMethod, LinearWeight, Weight
from m5_kernels.extras.devices.dot_linear import dot_linear
from m5_kernels.extras.devices.few_rows_linear import MAX_HOPPER_TOKENS
from m5_kernels.extras.devices.few_rows_tiles import NUM_SMS, HopperTile
from m5_kernels.extras.devices.hopper_device import fits_copy_engine, is_hopper
from m5_kernels.extras.devices.register_linear import MAX_TOKENS, fits_registers, register_linear
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.triton_or_twin import ceil_div
from milestone_llm.core.errors import InputError

from .tiled_linear import rounds_alike, tiled_linear

COPIED_BYTES = 16
"""The copy engine moves so many bytes at a time."""

LONG_ROW = 4096
"""Elements of a row of the weight from which on `dot_linear` is the fastest for few tokens."""
WIDE_TILE = HopperTile(128, 64, 8)
PART = 256
"""Inputs of a part of a small weight."""


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
        part = self.part_size(weight)
        if part and 1 <= len(hidden) <= MAX_TOKENS:
            return register_linear(hidden, weight, bias, part_size=part, launch=launch)
        if self.has_hopper and should_use_hopper(hidden, weight, len(weight)):
            from m5_kernels.extras.devices.hopper_linear import hopper_linear  # Gluon

            tile = None if part else WIDE_TILE
            return hopper_linear(hidden, weight, bias, tile=tile, part_size=part, launch=launch)
        if should_use_dot(hidden, weight):
            return dot_linear(hidden, weight, bias, launch=launch)
        return tiled_linear(hidden, weight, bias, part_size=part, launch=launch)

    def gate_up(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return silu(gate) * up of what `apply` returns."""
        part = self.part_size(weight) if launch.runs_triton(hidden) else None
        if part and 1 <= len(hidden) <= MAX_TOKENS:
            return register_linear(
                hidden, weight, bias, is_gated=True, part_size=part, launch=launch
            )
        if part and should_use_hopper(hidden, weight, len(weight) // 2):
            from m5_kernels.extras.devices.hopper_linear import hopper_linear  # Gluon

            return hopper_linear(hidden, weight, bias, is_gated=True, part_size=part, launch=launch)
        return self.activate(self.apply(hidden, weight, bias, launch), launch)

    def part_size(self, weight: torch.Tensor) -> int | None:
        """Return how many inputs a part has, for any number of rows. None: all of them."""
        is_small = weight.element_size() == 2 and fits_registers(*weight.shape)
        return PART if self.has_hopper and is_small else None

    def starts_early(self, num_tokens: int, weight: Weight) -> bool:
        """Return whether the layers of such a step load their weights before they wait."""
        return num_tokens <= MAX_TOKENS and self.part_size(weight) is not None

    def token_counts(self, max_tokens: int, weights: Sequence[LinearWeight]) -> Iterable[int]:
        """Return numbers of tokens between which tiles change."""
        return (16, 17, 64, 65, 128, 192, 256, 257, 384, 512, 768, 1024, 1536, 2048)


def should_use_hopper(hidden: torch.Tensor, weight: torch.Tensor, num_outputs: int) -> bool:
    """Return whether to use `hopper_linear` for more than 16 rows: with a small weight, or with so
    few outputs that all programs run at once."""
    (out_size, in_size), num_tokens = weight.shape, len(hidden)
    if not MAX_TOKENS < num_tokens <= MAX_HOPPER_TOKENS:
        return False
    num_programs = ceil_div(num_tokens, 64) * ceil_div(out_size, WIDE_TILE.columns)
    is_wide = num_tokens > 64 and num_programs <= NUM_SMS
    is_right = fits_registers(out_size, in_size) or is_wide
    return is_right and fits_copy_engine(hidden, in_size, num_outputs)


def should_use_dot(hidden: torch.Tensor, weight: torch.Tensor) -> bool:
    """Return whether rows are few, and so long that each program has many loads."""
    is_long = weight.shape[1] >= LONG_ROW and weight.element_size() == 2
    return is_long and 1 <= len(hidden) <= MAX_TOKENS and rounds_alike(hidden.device)
