"""`hidden @ weight.T` for few rows: a matrix product that is nothing but reading the weight.

    weight [out_size, in_size]            hidden [num_tokens <= ROWS, in_size]
      |== program 0: COLUMNS rows ==|       shared by all programs, from the L2 cache
      |== program 1 ===============|
      |  -> DEPTH elements at a time, several tiles in flight ->

With a handful of tokens in a step, each weight is used for a handful of multiplications, and the
time is that of reading it. The library picks tiles that were made for computing: on an H200 it
reads the 12.6 MB of a gate-up matrix at 1 TB/s for one token. Here every multiprocessor has a few
narrow strips of the weight to read, with enough bytes under way to keep the memory busy.

It saves nothing but waiting; beyond `MAX_TOKENS` tokens the library is as fast and is called.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .backend import ceil_div, next_power_of_2, runs_triton, tl, triton
from .tiles import LinearTile, linear_tile
# ruff: noqa: N803 - constants of a kernel are written in capitals, as everywhere in Triton


def skinny_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: LinearTile | None = None,
) -> torch.Tensor:
    """`hidden @ weight.T + bias`, accumulated in fp32.

    hidden: `[num_tokens, in_size]`, rows contiguous; weight: `[out_size, in_size]`, contiguous;
    bias: `[out_size]` or None. Returns `[num_tokens, out_size]`.
    """
    num_tokens, in_size = hidden.shape
    out_size = weight.shape[0]
    if not runs_triton(hidden):
        return skinny_linear_torch(hidden, weight, bias)
    tile = tile or linear_tile(num_tokens, out_size, in_size, hidden.dtype, hidden.device)
    if tile is None or num_tokens == 0:
        return F.linear(hidden, weight, bias)
    output = hidden.new_empty(num_tokens, out_size)
    _skinny_linear_kernel[(ceil_div(out_size, tile.columns),)](
        hidden, weight, bias, output,
        num_tokens, out_size, hidden.stride(0),
        IN_SIZE=in_size,
        ROWS=max(16, next_power_of_2(num_tokens)),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return output


@triton.jit
def _skinny_linear_kernel(
    hidden, weight, bias, output,
    num_tokens, out_size, hidden_stride,
    IN_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    rows = tl.arange(0, ROWS)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    # Rows past the end repeat the last one: nobody stores what comes of them.
    safe_rows = tl.minimum(rows, num_tokens - 1)
    safe_columns = tl.minimum(columns, out_size - 1).to(tl.int64)
    left = hidden + safe_rows[:, None] * hidden_stride + depth[None, :]
    right = weight + safe_columns[:, None] * IN_SIZE + depth[None, :]
    accumulator = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(0, IN_SIZE, DEPTH):
        if IN_SIZE % DEPTH == 0:
            x = tl.load(left + start)
            w = tl.load(right + start)
        else:
            mask = (start + depth < IN_SIZE)[None, :]
            x = tl.load(left + start, mask=mask, other=0.0)
            w = tl.load(right + start, mask=mask, other=0.0)
        accumulator = tl.dot(x, tl.trans(w), accumulator, input_precision="ieee")
    if HAS_BIAS:
        biases = tl.load(bias + columns, mask=columns < out_size, other=0.0)
        accumulator += biases.to(tl.float32)[None, :]
    pointers = output + rows[:, None].to(tl.int64) * out_size + columns[None, :]
    mask = (rows < num_tokens)[:, None] & (columns < out_size)[None, :]
    tl.store(pointers, accumulator.to(output.dtype.element_ty), mask=mask)


def skinny_linear_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: LinearTile | None = None,
) -> torch.Tensor:
    """The specification of `skinny_linear`."""
    return F.linear(hidden, weight, bias)
