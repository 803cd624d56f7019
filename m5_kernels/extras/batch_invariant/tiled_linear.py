"""`hidden @ weight.T` for any number of rows, each with the bits that it has alone.

    hidden [num_tokens, in_size]       weight [out_size, in_size]
      |== ROWS x DEPTH ==| -> -> ->      |== COLUMNS x DEPTH ==| -> -> ->     one program
      16 to 256 rows                     16 to 128 columns

A sum of floating-point numbers depends on its order. Here every sum takes the inputs from first to
last, 16 in each instruction of the tensor cores. A larger tile computes more sums together, and
none in another order. So the tile may depend on the number of rows. What would change the order is
a split of the inputs over several programs, or warps (split-K), unless there are the same parts for
any number of rows:

    inputs   |- part 0 -|- part 1 -|- part 2 -|- part 3 -|     ((part 0 + part 1) + part 2) + part 3

A program with one row computes them at the same time (`register_linear`), here one follows another.

On Hopper tiles of 16 rows are multiplied by another instruction than larger ones, and both round
alike: a test on a GPU holds that all tiles agree bit for bit. On newer GPUs that is not known, so
few rows take the tile of 64 there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
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
    (1.5, ProductTile(256, 128, 64, 8, 4)),
    (0.75, ProductTile(128, 128, 64, 4, 4)),
    (0.75, ProductTile(64, 128, 64, 4, 8)),
)
SMALL = (
    (0.45, ProductTile(64, 64, 128, 4, 6)),
    (0.45, ProductTile(64, 32, 128, 4, 4)),
    (0, ProductTile(64, 16, 128, 4, 5)),
)
FEW = (
    (0.7, ProductTile(16, 64, 128, 4, 4)),
    (0.7, ProductTile(16, 32, 128, 4, 5)),
    (0, ProductTile(16, 16, 256, 4, 4)),
)
"""For more than 64 rows, for up to 64, and for up to 16. A tile is taken if there are so many
programs for each multiprocessor. On an H200 these were the fastest of fifteen on average."""
WIDE = ProductTile(64, 64, 32, 4, 2)
"""For fp32."""


def tiled_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    tile: ProductTile | None = None,
    part_size: int | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias`. Rows must begin at multiples of 16 bytes.

    part_size: inputs of a part, a power of two; None: all of them.
    """
    num_tokens, in_size = hidden.shape
    out_size = len(weight)
    tile = tile or product_tile(num_tokens, out_size, hidden.element_size(), hidden.device)
    if part_size:
        tile = part_tile(tile, part_size, hidden.device)
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
            HAS_PARTS=bool(part_size),
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
    HAS_PARTS: tl.constexpr,
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
        if HAS_PARTS:  # tl.fma: Triton makes of `sums + dot` one sum from first to last
            sums = tl.fma(tl.dot(h, w.T, input_precision="ieee"), 1.0, sums)
        else:
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
    """Return the first tile with which there are enough programs."""
    if element_size == 4:
        return WIDE
    tiles: Sequence[tuple[float, ProductTile]] = LARGE + SMALL
    if num_tokens <= 64:
        tiles = FEW if num_tokens <= 16 and rounds_alike(device) else SMALL
    for enough, tile in tiles:
        num_programs = ceil_div(num_tokens, tile.rows) * ceil_div(out_size, tile.columns)
        if num_programs >= enough * num_multiprocessors(device):
            break
    return fit_product(tile, device)


def part_tile(tile: ProductTile, part_size: int, device: torch.device) -> ProductTile:
    """Return the tile for inputs in parts: with one part at a time, and registers for two sums."""
    rows = min(tile.rows, 128)
    num_warps = max(4, rows * tile.columns // 2048)
    return fit_product(
        tile._replace(rows=rows, depth=part_size, num_warps=num_warps, num_stages=6), device
    )


@functools.cache
def rounds_alike(device: torch.device) -> bool:
    """Return whether a product of 16 rows is known to round like one of 64: up to Hopper."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0)


def fit_product(tile: ProductTile, device: torch.device) -> ProductTile:
    """Return a tile that fits a GPU, with fewer stages, then half of its columns."""
    if device.type != "cuda":
        return tile
    gpu = GPU.of(device)
    while True:
        stage_bytes = 2 * tile.depth * (tile.rows + tile.columns)
        most = (gpu.shared_bytes - SCRATCH_BYTES) // stage_bytes
        if most >= 2 or tile.columns == 16:
            return tile._replace(num_stages=max(1, min(tile.num_stages, most)))
        tile = tile._replace(columns=tile.columns // 2)
