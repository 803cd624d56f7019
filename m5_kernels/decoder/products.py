"""Products with weights, `hidden @ weight.T`: by our kernel for one row, by the library for more.

A step of one row is nothing but reading weights, and there ours is faster than the library. Which
product suits other weights and numbers of rows depends on the GPU: objects that know better are
given to `Products`, and asked in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F

from m5_kernels.kernels.backend import runs_triton
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch
from m5_kernels.kernels.skinny_linear import skinny_linear

Matrix = Any
"""A weight `[out_size, in_size]`: a tensor, or what `decoder.weights.Matrices` makes of one."""


class Weight(NamedTuple):
    """A matrix that a step multiplies with."""

    matrix: Matrix
    is_gated: bool


class Product(Protocol):
    """A way to multiply that suits some weights and numbers of rows."""

    def suits(self, hidden: torch.Tensor, weight: Matrix, is_gated: bool) -> bool:
        """Whether it is to make this product."""

    def __call__(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        """Make it; arguments and result as those of `Products.linear` and `gate_up`."""

    def token_counts(self, max_tokens: int, weights: Sequence[Weight]) -> Iterable[int]:
        """Numbers of tokens between which it changes kernels: steps of so many compile them all."""
        return ()


class Products:
    """How a decoder multiplies.

    Args:
        special: ways to multiply, each for what it suits; the first that suits is taken.
    """

    def __init__(self, special: Sequence[Product] = ()) -> None:
        self.special = list(special)

    def linear(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`hidden @ weight.T + bias`, accumulated in fp32.

        hidden: `[num_tokens, in_size]`, rows contiguous; weight: `[out_size, in_size]`, contiguous;
        bias: `[out_size]` or None. Returns `[num_tokens, out_size]`.
        """
        for product in self.special:
            if product.suits(hidden, weight, is_gated=False):
                return product(hidden, weight, bias, is_gated=False)
        if len(hidden) == 1 and runs_triton(hidden):
            return skinny_linear(hidden, weight, bias)
        return F.linear(hidden, weight, bias)

    def gate_up(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """As `linear`, where the first half of the outputs is a gate: silu(gate) * up of them.

        Returns `[num_tokens, out_size / 2]`.
        """
        for product in self.special:
            if product.suits(hidden, weight, is_gated=True):
                return product(hidden, weight, bias, is_gated=True)
        if len(hidden) == 1 and runs_triton(hidden):
            return skinny_linear(hidden, weight, bias, is_gated=True)
        return silu_mul(F.linear(hidden, weight, bias))

    def token_counts(self, max_tokens: int, weights: Sequence[Weight]) -> list[int]:
        """Numbers of tokens, up to `max_tokens`, for which a special product has own kernels."""
        counts = (product.token_counts(max_tokens, weights) for product in self.special)
        return sorted(set(chain.from_iterable(counts)))


def linear_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
) -> torch.Tensor:
    """The specification of `Products.linear` and, gated, of `gate_up`."""
    output = F.linear(hidden, weight, bias)
    return silu_mul_torch(output) if is_gated else output
