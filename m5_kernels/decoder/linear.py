"""Linear layers, `hidden @ weight.T`: for each kind of weight, one object creates, loads and
applies it.

A step of one row only reads weights, and there our kernel is faster than the library. For more rows
the library multiplies. Other objects of this kind serve quantized weights, and kernels for some
GPUs and numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch
from m5_kernels.kernels.skinny_linear import skinny_linear

Weight = Any
"""A weight `[out_size, in_size]`, as `LinearMethod.create` returns it: a tensor, or a quantized
one. `weight.split(sizes)` returns parts of so many rows that share its memory."""


class LinearWeight(NamedTuple):
    """A weight of a layer, and whether `gate_up` is the layer that uses it."""

    weight: Weight
    is_gated: bool


@dataclass(frozen=True)
class LinearMethod:
    """Linear layers whose weights are tensors of the model's dtype (vLLM: `LinearMethodBase`).

    A subclass keeps weights in another form, or multiplies with other kernels.
    """

    one_row: Callable[..., torch.Tensor] | None = skinny_linear
    """The kernel for a step of one row. None: the library multiplies, as for more rows."""
    activate: Callable[..., torch.Tensor] = silu_mul
    """Computes SiLU(gate) * up of the output of a linear layer."""
    most_error: float | None = None
    """How far logits may be from those of exact weights (`relative_error`). None: as far as the
    dtype takes them."""

    # -- weights -----------------------------------------------------------------------------

    def joined(self, weights: Iterable[tuple[str, Any]]) -> Iterable[tuple[str, Any]]:
        """Return weights of a checkpoint, each with its scales if it is stored with some."""
        return weights

    def create(
        self, out_size: int, in_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> Weight:
        """Return memory for a weight, not yet filled."""
        return torch.empty(out_size, in_size, dtype=dtype, device=device)

    def create_lm_head(self, embedding: torch.Tensor, is_tied: bool) -> Weight:
        """Return memory for the LM head, which may be the embedding itself."""
        return embedding if is_tied else torch.zeros_like(embedding)

    def load(
        self, target: Weight, weight: Any, part: tuple[slice, ...], dtype: torch.dtype
    ) -> None:
        """Fill a created weight, or rows of one, with a part of a checkpoint's weight.

        weight: returns a tensor when it is sliced. dtype: the model's dtype, which may not be the
        file's.
        """
        target.copy_(weight[part])

    def load_randomly(self, target: Weight) -> None:
        """Fill a created weight with random numbers, to measure with."""
        target.normal_(std=0.02)

    def tie(self, lm_head: Weight, embedding: torch.Tensor) -> None:
        """Give the LM head the weights of the embedding, once the embedding is filled."""

    def finish(self) -> None:
        """Bring the weights into the form that the kernels need, once all are filled."""

    # -- products ----------------------------------------------------------------------------

    def apply(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return `hidden @ weight.T + bias`, accumulated in fp32, `[num_tokens, out_size]`.

        hidden: `[num_tokens, in_size]`, rows contiguous; weight: `[out_size, in_size]`, contiguous;
        bias: `[out_size]` or None.
        """
        if self.one_row is not None and len(hidden) == 1 and launch.runs_triton(hidden):
            return self.one_row(hidden, weight, bias, launch=launch)
        return F.linear(hidden, weight, bias)

    def gate_up(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return silu(gate) * up of what `apply` returns, `[num_tokens, out_size / 2]`."""
        if self.one_row is not None and len(hidden) == 1 and launch.runs_triton(hidden):
            return self.one_row(hidden, weight, bias, is_gated=True, launch=launch)
        return self.activate(F.linear(hidden, weight, bias), launch)

    # -- what a step's launches ask ----------------------------------------------------------

    def starts_early(self, num_tokens: int, weight: Weight) -> bool:
        """Return whether a step of so many tokens gains if kernels start EARLY (`kernels.pdl`)."""
        return False

    def token_counts(self, max_tokens: int, weights: Sequence[LinearWeight]) -> Iterable[int]:
        """Return numbers of tokens whose steps together launch all kernels, to compile them."""
        return ()


def linear_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """Specify `LinearMethod.apply` and, if `is_gated`, `gate_up`."""
    output = F.linear(hidden, weight, bias)
    return silu_mul_torch(output) if is_gated else output
