"""SiLU(gate) * up over the output of the merged gate-up product.

    gate_up  [num_tokens, 2 * size]   |=== gate: BLOCK ===|...   |=== up: BLOCK ===|...
                                               \\                     /
    output   [num_tokens, size]                 |=== BLOCK ===|...

Apart, the activation would be written and read again: two of five passes over `[num_tokens, size]`,
the widest tensor of a layer. Paper: Shazeer, GLU Variants Improve Transformer (2020).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .backend import ceil_div, next_power_of_2, runs_triton, tl, triton
from .early_start import launch_options, wait_for_previous


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, rounded to the tensor's type after each of the two, as Hugging Face does.

    gate_up: `[num_tokens, 2 * size]`, rows contiguous, the gate first.
    Returns `[num_tokens, size]`, contiguous.
    """
    if not runs_triton(gate_up):
        return silu_mul_torch(gate_up)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    block = min(1024, next_power_of_2(size))
    if num_tokens:
        _silu_mul_kernel[(num_tokens, ceil_div(size, block))](
            gate_up, output, gate_up.stride(0), size,
            BLOCK=block, num_warps=4, **launch_options(),
        )  # fmt: skip
    return output


@triton.jit
def _silu_mul_kernel(gate_up, output, stride, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_previous(PDL)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_up + token * stride + columns, mask=mask, other=0.0)
    up = tl.load(gate_up + token * stride + size + columns, mask=mask, other=0.0)
    tl.store(output + token * size + columns, gated(gate, up), mask=mask)


@triton.jit
def gated(gate, up):
    """`silu(gate) * up`, also for products that have both in registers."""
    values = gate.to(tl.float32)
    activation = (values * tl.sigmoid(values)).to(gate.dtype)
    return (activation.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """The specification of `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
