"""Linear layers with weights in 8 bits: how they are loaded, and which kernel multiplies.

    tokens                      kernel
    1, or 1..4 (small weight)   int8_linear: multiplies in registers, no tensor cores
    more, in bf16               hopper_int8 (on Hopper)
    more                        int8_linear: tensor cores

A token may get other bits together with other tokens, since their number decides the tile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from m5_kernels.decoder.linear import LinearMethod, LinearWeight, Weight
from m5_kernels.extras.devices.hopper_device import fits_copy_engine, is_hopper
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.silu_mul import silu_mul

from .hopper_int8_tiles import token_counts
from .int8_linear import int8_linear, max_int8_tokens
from .int8_weight import Int8Weight


def gpu_int8_linear(
    hidden: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    is_gated: bool,
    launch: Launch,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias` or, if `is_gated`, silu(gate) * up of that."""
    out_size, (num_tokens, in_size) = len(weight), hidden.shape
    has_rows = num_tokens > max_int8_tokens(out_size, in_size)
    if has_rows and fits_copy_engine(hidden, out_size // (1 + is_gated)):
        from .hopper_int8 import hopper_int8  # Gluon: NVIDIA's GPUs alone

        return hopper_int8(hidden, weight, bias, is_gated, launch=launch)
    output = int8_linear(hidden, weight, bias, launch=launch)
    return silu_mul(output, launch) if is_gated else output


@dataclass(frozen=True)
class Int8Linear(LinearMethod):
    """Rounds the weights of linear layers to 8 bits. The embedding is looked up, and unchanged."""

    most_error: float | None = 0.2
    """The most that was seen is 0.15."""
    weight_class: Any = Int8Weight
    """The class of a weight: `Int8Weight`, or one with the same methods."""
    linear: Callable[..., torch.Tensor] = gpu_int8_linear

    def create(
        self, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> Weight:
        """Return memory for a weight."""
        return self.weight_class.zeros(out_size, in_size, device)

    def create_lm_head(self, embedding: torch.Tensor, is_tied: bool) -> Weight:
        """Return memory for the LM head. A tied one is a copy, in 8 bits."""
        return self.weight_class.zeros(len(embedding), embedding.shape[1], embedding.device)

    def load(
        self, target: Weight, weight: Any, part: tuple[slice, ...], dtype: torch.dtype
    ) -> None:
        """Round part of a weight. Whole rows are read, since a scale is that of a whole row."""
        rows, columns = part
        target.round_from(weight[rows, :].to(dtype), columns)

    def load_randomly(self, target: Weight) -> None:
        """Fill a weight with random numbers, to measure with."""
        shape = len(target), target.in_size
        target.round_from(torch.empty(shape, device=target.scale.device).normal_(std=0.02))

    def tie(self, lm_head: Weight, embedding: torch.Tensor) -> None:
        """Round the embedding into the LM head."""
        lm_head.round_from(embedding)

    def apply(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return `hidden @ weight.T + bias`."""
        return self.linear(hidden, weight, bias, False, launch)

    def gate_up(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return silu(gate) * up of what `apply` returns."""
        return self.linear(hidden, weight, bias, True, launch)

    def token_counts(self, max_tokens: int, weights: Sequence[LinearWeight]) -> Iterable[int]:
        """Return where the tiles of `hopper_int8` change, if this is a Hopper."""
        products = {
            (len(weight) // (1 + is_gated), weight.in_size, is_gated)
            for weight, is_gated in weights
            if isinstance(weight, Int8Weight) and is_hopper(weight.words.device)
        }
        return token_counts(max_tokens, products) if products else ()
