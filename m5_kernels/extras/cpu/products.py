"""Products on a CPU: those of tensors by torch, those of few bits by the weights themselves."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from m5_kernels.decoder.products import Matrix, Product


class OwnProduct(Product):
    """Of weights that know how they are multiplied with.

    Args:
        weight_class: theirs; it has `product(hidden, bias)`.
    """

    def __init__(self, weight_class: type[Any]) -> None:
        self.weight_class = weight_class

    def suits(self, hidden: torch.Tensor, weight: Matrix, is_gated: bool) -> bool:
        """Whether the weight is one of them."""
        return isinstance(weight, self.weight_class)

    def __call__(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        """As `Products.linear`, or gated as `gate_up`."""
        output = weight.product(hidden, bias)
        return gated(output) if is_gated else output


class PlainProduct(Product):
    """`F.linear`, and the gate in two calls."""

    def suits(self, hidden: torch.Tensor, weight: Matrix, is_gated: bool) -> bool:
        """Whether the weight is a tensor."""
        return isinstance(weight, torch.Tensor)

    def __call__(
        self, hidden: torch.Tensor, weight: Matrix, bias: torch.Tensor | None, is_gated: bool
    ) -> torch.Tensor:
        """As `Products.linear`, or gated as `gate_up`."""
        output = F.linear(hidden, weight, bias)
        return gated(output) if is_gated else output


def gated(output: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of `[num_tokens, gate, up]`."""
    gate, up = output.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
