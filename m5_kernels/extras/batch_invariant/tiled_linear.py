"""`hidden @ weight.T` for any number of rows, each with the bits that it has alone.

    hidden [num_tokens, in_size]       weight [out_size, in_size]
      |== ROWS x DEPTH ==| -> -> ->      |== COLUMNS x DEPTH ==| -> -> ->     one program
      64 or 128 rows                     16 to 256 columns

A sum of floating-point numbers depends on its order. Here a row is always a row of the left factor,
and its sums take the inputs from first to last, 16 in each instruction of the tensor cores. A tile
may have more rows or columns. Then more sums are computed together, and none in another order. So
the tile may depend on the number of rows. What would change the order is a split of the inputs over
several programs (split-K), or another instruction, such as the one for 16 rows: on Hopper, 64 rows
are the fewest for which the compiler takes `wgmma`. Steps of few rows fill the rest with zeros,
which costs no reading.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from m5_kernels.kernels.gpu_tiles import GPU, SCRATCH_BYTES
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.triton_or_twin import HAS_TRITON, ceil_div, num_multiprocessors, tl, triton

if HAS_TRITON:
    from triton.tools.tensor_descriptor import TensorDescriptor

GROUP = 8
"""Tiles of rows that run next to each other, with the same part of the weight."""


class ProductTile(NamedTuple):
    """What a program multiplies, and how."""

    rows: int
    columns: int
    depth: int  # inputs at a time
    num_warps: int
    num_stages: int  # of so many inputs, in flight


LARGE = (
    ProductTile(128, 256, 64, 8, 4),
    ProductTile(128, 128, 64, 8, 4),
    ProductTile(64, 128, 64, 4, 4),
)
"""The larger a tile, the fewer times each number is read."""
SMALL = (
    ProductTile(64, 64, 128, 4, 4),
    ProductTile(64, 32, 128, 4, 4),
    ProductTile(64, 16, 128, 4, 5),
)
WIDE = ProductTile(64, 64, 32, 4, 2)
"""For fp32."""


def tiled_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: ProductTile | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias`. Rows must begin at multiples of 16 bytes."""
    num_tokens, in_size = hidden.shape
    out_size = len(weight)
    tile = tile or product_tile(num_tokens, out_size, hidden.element_size(), hidden.device)
    output = hidden.new_empty(num_tokens, out_size)
    stride = hidden.stride(0) if num_tokens > 1 else in_size
    grid = (ceil_div(num_tokens, tile.rows) * ceil_div(out_size, tile.columns),)
    if num_tokens:
        launch.kernel(_tiled_linear_kernel, grid)(
            TensorDescriptor(hidden, [num_tokens, in_size], [stride, 1], [tile.rows, tile.depth]),
            TensorDescriptor(weight, [out_size, in_size], [in_size, 1], [tile.columns, tile.depth]),
            bias, output,
            num_tokens, in_size, out_size,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            DEPTH=tile.depth,
            STAGES=tile.num_stages,
            GROUP=GROUP,
            num_warps=tile.num_warps,
            **launch.pdl_options(),
        )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_tokens"])
def _tiled_linear_kernel(
    hidden_boxes, weight_boxes, bias, output,
    num_tokens, in_size, out_size,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    num_across = tl.cdiv(out_size, COLUMNS)
    first_down = tl.program_id(0) // (GROUP * num_across) * GROUP
    num_down = tl.minimum(tl.cdiv(num_tokens, ROWS) - first_down, GROUP)
    place = tl.program_id(0) % (GROUP * num_across)
    row = (first_down + place % num_down) * ROWS
    column = place // num_down * COLUMNS
    wait_for_previous(PDL)
    sums = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in tl.range(0, in_size, DEPTH, num_stages=STAGES):
        h = hidden_boxes.load([row, start])
        w = weight_boxes.load([column, start])
        sums = tl.dot(h, w.T, sums, input_precision="ieee")
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    if bias is not None:
        sums += tl.load(bias + columns, mask=columns < out_size, other=0.0).to(tl.float32)[None, :]
    pointers = output + rows.to(tl.int64)[:, None] * out_size + columns[None, :]
    mask = (rows < num_tokens)[:, None] & (columns < out_size)[None, :]
    tl.store(pointers, sums.to(output.dtype.element_ty), mask=mask)


@functools.cache
def product_tile(
    num_tokens: int, out_size: int, element_size: int, device: torch.device
) -> ProductTile:
    """Return the largest tile with which every multiprocessor has a program, or the smallest."""
    if element_size == 4:
        return WIDE
    tiles = SMALL if num_tokens <= 64 else LARGE + SMALL
    enough = num_multiprocessors(device) * 3 // 4
    for tile in tiles:
        if ceil_div(num_tokens, tile.rows) * ceil_div(out_size, tile.columns) >= enough:
            break
    return fit_product(tile, GPU.of(device)) if device.type == "cuda" else tile


def fit_product(tile: ProductTile, gpu: GPU) -> ProductTile:
    """Return a tile that fits, with fewer stages, then half of its columns."""
    while True:
        stage_bytes = 2 * tile.depth * (tile.rows + tile.columns)
        most = (gpu.shared_bytes - SCRATCH_BYTES) // stage_bytes
        if most >= 2 or tile.columns == 16:
            return tile._replace(num_stages=max(1, min(tile.num_stages, most)))
        tile = tile._replace(columns=tile.columns // 2)
