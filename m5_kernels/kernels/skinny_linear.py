"""`hidden @ weight.T` for up to four rows: a matrix product that is nothing but reading the weight.

    weight [out_size, in_size]              hidden [num_tokens, in_size], one to four rows
      |== program 0: COLUMNS rows ==|         shared by all programs, from the L2 cache
      |== program 1 ================|
      |   DEPTH elements at a time  |  -> products in registers, summed once at the end

With one token in a step each weight is used for one multiplication. A tensor core would
work on a sixteenth of its tile; the library's choice for a single token is at times a tile made
for many, which leaves most of the GPU waiting. Here nothing but loads matters: no shared memory, no
pipeline to fill, all of a strip's loads under way at once.

It is for weights that do not fit into registers (`register_linear`), and for fp32. Every row is
added up in the same order, however many there are: a token computed beside guesses gets the very
bits that it would have got alone.
"""

from __future__ import annotations

import torch

from .backend import ceil_div, launch_options, tl, triton, wait_for_previous
from .silu_mul import gated
from .tiles import LinearTile, linear_tile


def skinny_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: LinearTile | None = None,
    pdl: int = 0,
) -> torch.Tensor:
    """As `linear`, for one to four rows."""
    num_tokens, in_size = hidden.shape
    size = len(weight) // 2 if is_gated else len(weight)
    tile = tile or linear_tile(in_size)
    output = hidden.new_empty(num_tokens, size)
    _skinny_linear_kernel[(ceil_div(size, tile.columns // 2 if is_gated else tile.columns),)](
        hidden, weight, bias, output,
        size, hidden.stride(0),
        NUM_TOKENS=num_tokens,
        IN_SIZE=in_size,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
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
    if bias is not None:
        biases = tl.load(bias + columns).to(tl.float32)
    w = _load_part(rows, 0, depth, IN_SIZE, DEPTH)
    wait_for_previous(PDL)  # the first part of the weight is on its way by now
    # One sum a row, and none of all rows at once: the compiler would order that by their number.
    sums = tl.tuple(())
    for _ in tl.static_range(NUM_TOKENS):
        sums += (tl.zeros([COLUMNS, DEPTH], dtype=tl.float32),)
    for start in tl.static_range(0, IN_SIZE, DEPTH):
        if start > 0:
            w = _load_part(rows, start, depth, IN_SIZE, DEPTH)
        more = tl.tuple(())
        for token in tl.static_range(NUM_TOKENS):
            row = hidden + token * hidden_stride
            more += (sums[token] + w * _load_part(row, start, depth, IN_SIZE, DEPTH),)
        sums = more
    for token in tl.static_range(NUM_TOKENS):
        _store_row(output + token * size, size, sums[token], biases, IS_GATED)


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
