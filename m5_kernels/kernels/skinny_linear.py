"""`hidden @ weight.T` for one row: a linear layer whose time is that of reading the weight.

    weight [out_size, in_size]              hidden [1, in_size]
      |== program 0: COLUMNS rows ==|         shared by all programs, from the L2 cache
      |== program 1 ================|
      |   DEPTH elements at a time  |  -> products in registers, summed once at the end

With one token in a step each weight is used for one multiplication. A tensor core would use a
sixteenth of its tile. The library sometimes chooses, for a single token, a tile that was made for
many tokens, and most of the GPU waits. Here only loads matter: there is no shared memory and no
pipeline to fill, and all loads of a strip are in flight at once. With two rows `dot_linear` takes
about as long, with three less, so they use that kernel.

It is for weights that do not fit into registers (`register_linear`), and for fp32.
"""

from __future__ import annotations

import torch

from .gpu_tiles import linear_tile
from .launch import PLAIN, Launch
from .pdl import wait_for_previous
from .silu_mul import gated
from .tiles import LinearTile
from .triton_or_twin import ceil_div, tl, triton


def skinny_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: LinearTile | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias` for one row, gated if `is_gated`; see `linear_torch`."""
    in_size = weight.shape[1]
    size = len(weight) // 2 if is_gated else len(weight)
    tile = tile or linear_tile(in_size)
    output = hidden.new_empty(1, size)
    num_programs = ceil_div(size, tile.columns // 2 if is_gated else tile.columns)
    launch.kernel(_skinny_linear_kernel, (num_programs,))(
        hidden, weight, bias, output,
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
    wait_for_previous(PDL)  # the load of the first part of the weight is in flight by now
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
    """Return elements [start, start + DEPTH) of each row in fp32, with zeros past the end."""
    if start + DEPTH <= IN_SIZE:
        part = tl.load(rows + (start + depth)[None, :])
    else:
        is_there = (start + depth < IN_SIZE)[None, :]
        part = tl.load(rows + (start + depth)[None, :], mask=is_there, other=0.0)
    return part.to(tl.float32)
