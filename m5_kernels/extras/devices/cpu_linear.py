"""Linear layers on a CPU: torch multiplies, and SiLU * mul is two calls."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from m5_kernels.decoder.linear import LinearMethod, Weight
from m5_kernels.kernels.launch import PLAIN, Launch


@dataclass(frozen=True)
class CPULinear(LinearMethod):
    """Linear layers whose weights are tensors of the model's dtype."""

    def apply(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return `hidden @ weight.T + bias`."""
        return F.linear(hidden, weight, bias)

    def gate_up(
        self,
        hidden: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return silu(gate) * up of what `apply` returns."""
        return silu_mul_in_place(F.linear(hidden, weight, bias))


def silu_mul_in_place(output: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up of `[num_tokens, gate, up]`."""
    gate, up = output.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
