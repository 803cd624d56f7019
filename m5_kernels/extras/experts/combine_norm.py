"""The sum of each token's experts, fused with what follows: the residual stream and its norm.

    outputs   [num_tokens * top_k, hidden_size]   |== top_k rows of a token, one program ==|
    shared    [num_tokens, hidden_size]           |== the expert that all share ===========|
    residual  [num_tokens, hidden_size]           |== added to, in place ==================|
    output    [num_tokens, hidden_size]           |== RMSNorm =============================|

It rounds where `combine` and `add_rms_norm` round, so it has their bits, with a launch less.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from m5_kernels.kernels.launch import Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.rms_norm import norm_of_row
from m5_kernels.kernels.triton_or_twin import next_power_of_2, tl, triton


class Pairs(NamedTuple):
    """What a token's experts return, not yet summed."""

    outputs: torch.Tensor
    """`[num_tokens * top_k, hidden_size]`, contiguous, the pairs of a token next to each other."""
    top_k: int
    shared: torch.Tensor | None
    """`[num_tokens, hidden_size]`, contiguous, or None."""


def add_norm_of_pairs(
    add_norm: Callable[..., torch.Tensor],
    hidden: torch.Tensor | Pairs,
    residual: torch.Tensor,
    weight: torch.Tensor,
    epsilon: float,
    launch: Launch,
) -> torch.Tensor:
    """Set `residual += hidden`, and return the norm of the sum. A tensor goes to `add_norm`.

    residual: `[num_tokens, hidden_size]`, rows contiguous, is changed in place; weight:
    `[hidden_size]`. Returns `[num_tokens, hidden_size]`, contiguous.
    """
    if isinstance(hidden, torch.Tensor):
        return add_norm(hidden, residual, weight, epsilon, launch)
    outputs, top_k, shared = hidden
    num_tokens, hidden_size = residual.shape
    output = torch.empty_like(residual, memory_format=torch.contiguous_format)
    row = next_power_of_2(hidden_size)
    if num_tokens:
        launch.kernel(_combine_norm_kernel, (num_tokens,))(
            outputs, shared, residual, weight, output,
            residual.stride(0), epsilon,
            HIDDEN_SIZE=hidden_size,
            ROW=row,
            TOP_K=top_k,
            num_warps=min(16, max(1, row // 512)),
            **launch.pdl_options(),
        )  # fmt: skip
    return output


@triton.jit
def _combine_norm_kernel(
    outputs, shared, residual, weight, output,
    residual_stride, epsilon,
    HIDDEN_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    TOP_K: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, ROW)
    mask = columns < HIDDEN_SIZE
    weights = tl.load(weight + columns, mask=mask, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    pointers = residual + token * residual_stride + columns
    before = tl.load(pointers, mask=mask, other=0.0)
    total = tl.zeros([ROW], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):
        pair = outputs + (token * TOP_K + choice) * HIDDEN_SIZE + columns
        total += tl.load(pair, mask=mask, other=0.0).to(tl.float32)
    if shared is not None:
        row = tl.load(shared + token * HIDDEN_SIZE + columns, mask=mask, other=0.0)
        total += row.to(tl.float32)
    total = total.to(before.dtype).to(tl.float32) + before.to(tl.float32)
    row = total.to(before.dtype)
    tl.store(pointers, row, mask=mask)
    normed = norm_of_row(row, weights, epsilon, HIDDEN_SIZE)
    tl.store(output + token * HIDDEN_SIZE + columns, normed, mask=mask)
