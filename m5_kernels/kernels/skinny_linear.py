"""`hidden @ weight.T` for one row: a matrix product that is nothing but reading the weight.

    weight [out_size, in_size]              hidden [1, in_size]
      |== program 0: COLUMNS rows ==|         shared by all programs, from the L2 cache
      |== program 1 ================|
      |   DEPTH elements at a time  |  -> products in registers, summed once at the end

With one token in a step each weight is used for one multiplication. A tensor core would
work on a sixteenth of its tile; the library's choice for a single token is at times a tile made
for many, which leaves most of the GPU waiting. Here nothing but loads matters: no shared memory, no
pipeline to fill, all of a strip's loads under way at once. With two rows `dot_linear` takes about
as long, with three less, so they have that.

It is for weights that do not fit into registers (`register_linear`), and for fp32.
"""

from __future__ import annotations

import torch

from .backend import ceil_div, tl, triton
from .early_start import launch_options, wait_for_previous
from .silu_mul import gated
from .tiles import LinearTile, linear_tile


def skinny_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: LinearTile | None = None,
) -> torch.Tensor:
    """As `linear`, for one row."""
    in_size = weight.shape[1]
    size = len(weight) // 2 if is_gated else len(weight)
    tile = tile or linear_tile(in_size)
    output = hidden.new_empty(1, size)
    _skinny_linear_kernel[(ceil_div(size, tile.columns // 2 if is_gated else tile.columns),)](
        hidden, weight, bias, output,
        size,
        IN_SIZE=in_size,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        IS_GATED=is_gated,
        num_warps=tile.num_warps,
        **launch_options(),
    )  # fmt: skip
    return output


@triton.jit
def _skinny_linear_kernel(
    hidden, weight, bias, output,
    size,
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
    sums = w * _load_part(hidden, 0, depth, IN_SIZE, DEPTH)
    for start in tl.static_range(DEPTH, IN_SIZE, DEPTH):
        w = _load_part(rows, start, depth, IN_SIZE, DEPTH)
        sums += w * _load_part(hidden, start, depth, IN_SIZE, DEPTH)
    results = (tl.sum(sums, 1) + biases).to(output.dtype.element_ty)
    if IS_GATED:
        gate, up = tl.split(tl.trans(tl.reshape(results, [2, OUTPUTS])))
        results = gated(gate, up)
    places = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(output + places, results, mask=places < size)


@triton.jit
def _load_part(rows, start: tl.constexpr, depth, IN_SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Elements [start, start + DEPTH) of each row, fp32, zeros past the end."""
    if start + DEPTH <= IN_SIZE:
        part = tl.load(rows + (start + depth)[None, :])
    else:
        is_there = (start + depth < IN_SIZE)[None, :]
        part = tl.load(rows + (start + depth)[None, :], mask=is_there, other=0.0)
    return part.to(tl.float32)
