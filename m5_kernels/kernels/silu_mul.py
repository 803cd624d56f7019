"""SiLU(gate) * up of the output of the merged gate-up layer.

    gate_up  [num_tokens, 2 * size]   |=== gate: BLOCK ===|...   |=== up: BLOCK ===|...
                                               \\                     /
    output   [num_tokens, size]                 |=== BLOCK ===|...

In two kernels, the activation would be written and read again. That would be two of five passes
over `[num_tokens, size]`, the widest tensor of a layer.
Paper: Shazeer, GLU Variants Improve Transformer (2020).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .launch import PLAIN, Launch
from .pdl import wait_for_previous
from .triton_or_twin import ceil_div, next_power_of_2, tl, triton


def silu_mul(gate_up: torch.Tensor, launch: Launch = PLAIN) -> torch.Tensor:
    """Return `silu(gate) * up`, rounded to the tensor's dtype after each of the two, as Hugging
    Face does.

    gate_up: `[num_tokens, 2 * size]`, rows contiguous, the gate first.
    Returns `[num_tokens, size]`, contiguous.
    """
    if not launch.runs_triton(gate_up):
        return silu_mul_torch(gate_up)
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = gate_up.new_empty(num_tokens, size)
    block = min(1024, next_power_of_2(size))
    if num_tokens:
        launch.kernel(_silu_mul_kernel, (num_tokens, ceil_div(size, block)))(
            gate_up, output, gate_up.stride(0), size,
            BLOCK=block, num_warps=4, **launch.pdl_options(),
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
    """Return `silu(gate) * up`; also for linear kernels that have both in registers."""
    values = gate.to(tl.float32)
    activation = (values * tl.sigmoid(values)).to(gate.dtype)
    return (activation.to(tl.float32) * up.to(tl.float32)).to(gate.dtype)


def silu_mul_torch(gate_up: torch.Tensor) -> torch.Tensor:
    """Specify `silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up
