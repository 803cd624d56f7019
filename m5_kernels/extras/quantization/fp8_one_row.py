"""`hidden @ weight.T` for one row and a weight in e4m3: half as much to read as in bf16.

As in `skinny_linear` there are only loads and products in registers. The activations keep their
bits: rounding them too would lose as much again, and gain nothing while all wait for the weight.

    a lane's weights    |w0 .. w7|w8 .. w15|    16 bytes, one load
    its hidden states   |h0 .. h7|              16 bytes, a load for each half
                                 |h8 .. h15|

A lane loads 16 bytes at once: that is 16 weights, but 8 hidden states. So hidden states are loaded
in two halves, by the places of the weights that each lane has, and no lane needs another's. Each
lane sums its own 8 products first, so that sums take few registers and many loads are in flight.
"""

from __future__ import annotations

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.silu_mul import gated, silu_mul_torch
from m5_kernels.kernels.tiles import LinearTile
from m5_kernels.kernels.triton_or_twin import ceil_div, tl, triton

from .fp8_weight import Fp8Weight, fp8_linear_torch

SHORT_ROW = 4096
"""Most weights of a short row."""
TILE = LinearTile(4, 1024, 2)
"""The tile of short rows. It was chosen on an H200 with the shapes of Qwen3-8B, as the next one."""
LONG_TILE = LinearTile(2, 1024, 1)
PARTS_AHEAD = tl.constexpr(2)
"""Parts of a row that are loaded before the hidden states are there. With more, the small kernels
before this one take longer."""


def one_row_fp8(
    hidden: torch.Tensor,
    weight: Fp8Weight,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: LinearTile | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias` for at most one row, gated if `is_gated`."""
    if not len(hidden) or not launch.runs_triton(hidden):
        output = fp8_linear_torch(hidden, weight, bias)
        return silu_mul_torch(output) if is_gated else output
    in_size = weight.values.shape[1]
    tile = tile or (TILE if in_size <= SHORT_ROW else LONG_TILE)
    size = len(weight) // 2 if is_gated else len(weight)
    output = hidden.new_empty(1, size)
    num_programs = ceil_div(size, tile.columns // 2 if is_gated else tile.columns)
    launch.kernel(_one_row_kernel, (num_programs,))(
        hidden, weight.values, weight.scale, bias, output,
        size,
        IN_SIZE=in_size,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        IS_GATED=is_gated,
        num_warps=tile.num_warps,
        **launch.pdl_options(),
    )  # fmt: skip
    return output


@triton.jit
def _one_row_kernel(
    hidden, values, scale, bias, output,
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
    rows = values + columns.to(tl.int64)[:, None] * IN_SIZE
    factor = tl.load(scale)
    biases = tl.zeros([COLUMNS], dtype=tl.float32)
    if bias is not None:
        biases = tl.load(bias + columns).to(tl.float32)
    parts = tl.tuple(())
    for start in tl.static_range(0, IN_SIZE, DEPTH):
        if start < PARTS_AHEAD * DEPTH:
            parts += (_load_part(rows, start, depth, IN_SIZE, DEPTH),)
    wait_for_previous(PDL)  # the loads of the first parts of the weight are in flight by now
    each = tl.arange(0, DEPTH // 2)
    halves = tl.max_contiguous(each // 8 * 16 + each % 8, 8)
    sums = tl.zeros([COLUMNS, DEPTH // 16], dtype=tl.float32)
    for start in tl.static_range(0, IN_SIZE, DEPTH):
        if start < PARTS_AHEAD * DEPTH:
            w = parts[start // DEPTH]
        else:
            w = _load_part(rows, start, depth, IN_SIZE, DEPTH)
        w = tl.permute(tl.reshape(w, [COLUMNS, DEPTH // 16, 2, 8]), [0, 1, 3, 2])
        first, second = tl.split(w)
        sums += _sums_of_eight(first, _load_part(hidden, start, halves, IN_SIZE, DEPTH))
        sums += _sums_of_eight(second, _load_part(hidden, start, halves + 8, IN_SIZE, DEPTH))
    results = (tl.sum(sums, 1) * factor + biases).to(output.dtype.element_ty)
    if IS_GATED:
        gate, up = tl.split(tl.trans(tl.reshape(results, [2, OUTPUTS])))
        results = gated(gate, up)
    places = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    tl.store(output + places, results, mask=places < size)


@triton.jit
def _load_part(rows, start: tl.constexpr, depth, IN_SIZE: tl.constexpr, DEPTH: tl.constexpr):
    """Return elements [start, start + DEPTH) of each row, with zeros past the end."""
    if start + DEPTH <= IN_SIZE:
        return tl.load(rows + (start + depth)[None, :])
    is_there = (start + depth < IN_SIZE)[None, :]
    return tl.load(rows + (start + depth)[None, :], mask=is_there, other=0.0)


@triton.jit
def _sums_of_eight(weights, hidden):
    """Return the sum of each lane's products. weights: `[COLUMNS, SPANS, 8]`; hidden: a row."""
    states = tl.reshape(hidden, [1, weights.shape[1], 8]).to(tl.float32)
    return tl.sum(weights.to(tl.float32) * states, 2)
