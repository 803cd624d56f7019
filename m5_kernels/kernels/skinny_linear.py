"""`hidden @ weight.T` for up to four rows: a matrix product that is nothing but reading the weight.

    weight [out_size, in_size]              hidden [num_tokens, in_size], one to four rows
      |== program 0: COLUMNS rows ==|         shared by all programs, from the L2 cache
      |== program 1 ================|
      |   DEPTH elements at a time  |  -> products in registers, summed once at the end

With one token in a step each weight is used for one multiplication. A tensor core would
work on a sixteenth of its tile; the library's choice for a single token is at times a tile made
for many, which leaves most of the GPU waiting. Here nothing but loads matters: no shared memory, no
pipeline to fill, all of a strip's loads under way at once.

It is for weights that do not fit into registers (`register_linear`), and for fp32. Beyond
`max_tokens`, `dot_linear` or the library is faster. Up to there every row is added up in the same
order, however many there are: a token computed beside guesses gets the very bits that it would have
got alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .backend import ceil_div, launch_options, runs_triton, tl, triton, wait_for_previous
from .silu_mul import gated, silu_mul_torch
from .tiles import LONG_ROW, LinearTile, linear_tile


def max_tokens(in_size: int) -> int:
    """Tokens up to which the library is slower; fewer where the rows of the weight are long."""
    return 4 if in_size <= LONG_ROW else 1


def skinny_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: LinearTile | None = None,
    pdl: int = 0,
) -> torch.Tensor:
    """`hidden @ weight.T + bias`, accumulated in fp32.

    hidden: `[num_tokens, in_size]`, rows contiguous; weight: `[out_size, in_size]`, contiguous;
    bias: `[out_size]` or None. Returns `[num_tokens, out_size]`.
    is_gated: the first half of the outputs is a gate: returns silu(gate) * up, half as many.
    pdl: start before the previous kernel ends, which must not be the one that wrote the weight.
    """
    num_tokens, in_size = hidden.shape
    size = len(weight) // 2 if is_gated else len(weight)
    if not runs_triton(hidden) or not 1 <= num_tokens <= max_tokens(in_size):
        return skinny_linear_torch(hidden, weight, bias, is_gated)
    tile = tile or linear_tile(in_size)
    output = hidden.new_empty(num_tokens, size)
    _skinny_linear_kernel[(ceil_div(size, tile.columns // 2 if is_gated else tile.columns),)](
        hidden, weight, bias, output,
        size, hidden.stride(0),
        NUM_TOKENS=num_tokens,
        IN_SIZE=in_size,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        PDL=pdl,
        num_warps=tile.num_warps,
        **launch_options(pdl),
    )  # fmt: skip
    return output


@triton.jit
def _skinny_linear_kernel(
    hidden, weight, bias, output,
    size, hidden_stride,
    NUM_TOKENS: tl.constexpr,
    IN_SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_GATED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    OUTPUTS: tl.constexpr = COLUMNS // 2 if IS_GATED else COLUMNS
    column = tl.arange(0, COLUMNS)
    outputs = tl.minimum(tl.program_id(0) * OUTPUTS + column % OUTPUTS, size - 1)
    columns = column // OUTPUTS * size + outputs
    depth = tl.arange(0, DEPTH)
    rows = weight + columns.to(tl.int64)[:, None] * IN_SIZE
    biases = tl.zeros([COLUMNS], dtype=tl.float32)
    if HAS_BIAS:
        biases = tl.load(bias + columns).to(tl.float32)
    w = _load_part(rows, 0, depth, IN_SIZE, DEPTH)
    wait_for_previous(PDL)  # the first part of the weight is on its way by now
    # One sum a row, and none of all rows at once: the compiler would order that by their number.
    first = tl.zeros([COLUMNS, DEPTH], dtype=tl.float32)
    second = tl.zeros([COLUMNS, DEPTH], dtype=tl.float32)
    third = tl.zeros([COLUMNS, DEPTH], dtype=tl.float32)
    fourth = tl.zeros([COLUMNS, DEPTH], dtype=tl.float32)
    for start in tl.static_range(0, IN_SIZE, DEPTH):
        if start > 0:
            w = _load_part(rows, start, depth, IN_SIZE, DEPTH)
        first += w * _load_part(hidden, start, depth, IN_SIZE, DEPTH)
        if NUM_TOKENS > 1:
            second += w * _load_part(hidden + hidden_stride, start, depth, IN_SIZE, DEPTH)
        if NUM_TOKENS > 2:
            third += w * _load_part(hidden + 2 * hidden_stride, start, depth, IN_SIZE, DEPTH)
        if NUM_TOKENS > 3:
            fourth += w * _load_part(hidden + 3 * hidden_stride, start, depth, IN_SIZE, DEPTH)
    _store_row(output, size, first, biases, IS_GATED)
    if NUM_TOKENS > 1:
        _store_row(output + size, size, second, biases, IS_GATED)
    if NUM_TOKENS > 2:
        _store_row(output + 2 * size, size, third, biases, IS_GATED)
    if NUM_TOKENS > 3:
        _store_row(output + 3 * size, size, fourth, biases, IS_GATED)


@triton.jit
def _store_row(row, size, products, biases, IS_GATED: tl.constexpr):
    results = (tl.sum(products, 1) + biases).to(row.dtype.element_ty)
    if IS_GATED:
        gate, up = tl.split(tl.trans(tl.reshape(results, [2, products.shape[0] // 2])))
        results = gated(gate, up)
    columns = tl.program_id(0) * results.shape[0] + tl.arange(0, results.shape[0])
    tl.store(row + columns, results, mask=columns < size)


@triton.jit
def _load_part(rows, start: tl.constexpr, depth, IN_SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Elements [start, start + DEPTH) of each row, fp32, zeros past the end."""
    if start + DEPTH <= IN_SIZE:
        part = tl.load(rows + (start + depth)[None, :])
    else:
        is_there = (start + depth < IN_SIZE)[None, :]
        part = tl.load(rows + (start + depth)[None, :], mask=is_there, other=0.0)
    return part.to(tl.float32)


def skinny_linear_torch(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: LinearTile | None = None,
    pdl: int = 0,
) -> torch.Tensor:
    """The specification of `skinny_linear`."""
    output = F.linear(hidden, weight, bias)
    return silu_mul_torch(output) if is_gated else output
