"""SwiGLU with limits, as gpt-oss has it: `gate * sigmoid(alpha * gate) * (up + 1)`.

Gate and up are clamped first, the gate from above alone. Other families compute SiLU(gate) * up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m5_kernels.kernels.triton_or_twin import tl, triton


@dataclass(frozen=True)
class ClampedSwiGLU:
    """Its two numbers. Called, it specifies what `clamped_swiglu` computes."""

    alpha: float
    limit: float

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Return the neurons, `[..., size]`. gate_up: `[..., 2 * size]`, the gates first."""
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


@triton.jit
def clamped_swiglu(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr):
    """Return the neurons of gates and ups that are in registers, fp32. NaN stays NaN."""
    gate = tl.where(gate > LIMIT, LIMIT, gate)
    up = tl.where(up > LIMIT, LIMIT, up)
    up = tl.where(up < -LIMIT, -LIMIT, up)
    return gate * tl.sigmoid(ALPHA * gate) * (up + 1.0)
