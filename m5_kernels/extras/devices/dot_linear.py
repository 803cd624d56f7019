"""`hidden @ weight.T` for up to 16 rows on tensor cores, at the speed at which the weight is read.

    weight [out_size, in_size]                  hidden [num_tokens, in_size], padded to 16 rows
      |== program 0: COLUMNS x DEPTH ==|  ...     x   |== DEPTH x 16 ==|  ...
      |== program 1 ===================|  ...         several tiles of both are on their way at once

A tensor core multiplies 64 x 16 numbers with 16 x 16. The weight takes the long side, the tokens
the short one, and most of that is wasted if they are few. That costs no time, since everything
waits for the weight. So 16 rows take as long as one. All rows are summed in the same order, however
many there are: a token computed next to draft tokens gets the same bits as if computed alone.

It saves what a library loses with tiles made for many rows, or with a product that is cut into
parts and summed by a second kernel.
"""

from __future__ import annotations

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.triton_or_twin import ceil_div, tl, triton

from .few_rows_tiles import DotTile, dot_tile

MAX_TOKENS = 16


def dot_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: DotTile | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias`, for at most `MAX_TOKENS` rows in fp16 or bf16."""
    num_tokens, in_size = hidden.shape
    out_size = len(weight)
    tile = tile or dot_tile(out_size, hidden.device)
    output = hidden.new_empty(num_tokens, out_size)
    launch.kernel(_dot_linear_kernel, (ceil_div(out_size, tile.columns),))(
        hidden, weight, bias, output,
        num_tokens, in_size, out_size, hidden.stride(0),
        TOKENS=MAX_TOKENS,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.num_stages,
        IS_EVEN=in_size % tile.depth == 0,
        num_warps=tile.num_warps,
        **launch.pdl_options(),
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_tokens"])
def _dot_linear_kernel(
    hidden, weight, bias, output,
    num_tokens, in_size, out_size, hidden_stride,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = columns < out_size
    tokens = tl.arange(0, TOKENS)
    is_token = tokens < num_tokens
    depth = tl.arange(0, DEPTH)
    rows = tl.minimum(columns, out_size - 1).to(tl.int64)[:, None] * in_size
    weights = weight + rows + depth[None, :]
    states = hidden + tokens[:, None] * hidden_stride + depth[None, :]
    wait_for_previous(PDL)
    sums = tl.zeros([COLUMNS, TOKENS], dtype=tl.float32)
    for start in tl.range(0, in_size, DEPTH, num_stages=STAGES):
        if IS_EVEN:
            w = tl.load(weights + start)
            h = tl.load(states + start, mask=is_token[:, None], other=0.0)
        else:
            is_there = (start + depth < in_size)[None, :]
            w = tl.load(weights + start, mask=is_there, other=0.0)
            h = tl.load(states + start, mask=is_token[:, None] & is_there, other=0.0)
        sums = tl.dot(w, tl.trans(h), sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + columns, mask=is_column, other=0.0).to(tl.float32)[:, None]
    pointers = output + tokens[None, :] * out_size + columns[:, None]
    mask = is_column[:, None] & is_token[None, :]
    tl.store(pointers, sums.to(output.dtype.element_ty), mask=mask)
