"""Tiles of the linear layers of few rows, chosen on an H200 like those of `kernels.gpu_tiles`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from m5_kernels.kernels.gpu_tiles import GPU, SCRATCH_BYTES
from m5_kernels.kernels.tiles import LinearTile
from m5_kernels.kernels.triton_or_twin import ceil_div, next_power_of_2, num_multiprocessors


class DotTile(NamedTuple):
    """How a program walks a linear layer of a few rows on tensor cores."""

    columns: int  # outputs
    depth: int  # inputs at a time
    num_warps: int
    num_stages: int  # tiles in flight


class HopperTile(NamedTuple):
    """How a program covers a linear layer of 64 rows with a 16-bit weight, on Hopper."""

    columns: int  # outputs; with a gate, as many of gate and up each
    depth: int  # inputs at a time
    num_stages: int  # of so many inputs, in flight


SHORT_ROW = 1024
"""Elements of a short row of a weight: with many of them, even one token uses tensor cores."""
NUM_SMS = 132
"""Multiprocessors of an H200. Programs that share a tile run at the same time there."""
ENOUGH_PROGRAMS = 96
RING_BYTES = 192 * 1024
"""Shared memory of a multiprocessor that the copy engine fills. The rest is for results."""


def register_tile(in_size: int) -> LinearTile:
    """Return the tile of a linear layer of up to 16 rows whose weight is kept in registers.

    With longer rows more warps share a row of the weight, or there would not be enough registers.
    """
    if in_size > 1024:
        return LinearTile(16, 512, 4)
    return LinearTile(16, max(64, min(1024, next_power_of_2(in_size))), 2)


@functools.cache
def dot_tile(out_size: int, device: torch.device) -> DotTile:
    """Return the tile of a linear layer of up to 16 rows on tensor cores, in 16 bits.

    If programs are few, each has more loads in flight. If they are many, two share a
    multiprocessor, and so do the last ones of a layer and the first ones of the next.
    """
    tile = DotTile(64, 128, 4, 4)
    if device.type != "cuda":
        return tile
    if 2 * out_size <= num_multiprocessors(device) * tile.columns:
        tile = tile._replace(num_stages=6)
    return fit_dot(tile, GPU.of(device))


def fit_dot(tile: DotTile, gpu: GPU) -> DotTile:
    """Return a tile that fits, with fewer stages."""
    stage_bytes = 2 * tile.depth * (tile.columns + 16)
    most = (gpu.shared_bytes - SCRATCH_BYTES) // stage_bytes
    return tile._replace(num_stages=max(1, min(tile.num_stages, most)))


def hopper_tile(num_tokens: int, size: int, is_gated: bool) -> HopperTile:
    """Return the tile of `hopper_linear`: the narrowest whose programs all run at once.

    Its stages are as many as fit into shared memory.

    size: outputs, or half of them with a gate.
    """

    def num_programs(columns: int) -> int:
        return ceil_div(num_tokens, 64) * ceil_div(size, columns)

    most = {32: ENOUGH_PROGRAMS, 64: NUM_SMS}  # each program of 32 outputs reads the rows anew
    widest = 64 if is_gated else 128
    columns = next((each for each in most if num_programs(each) <= most[each]), widest)
    width = 2 * columns if is_gated else columns
    depth = 128 if width <= 64 else 64
    programs_per_sm = 1 if num_programs(columns) <= NUM_SMS else 2
    return HopperTile(columns, depth, RING_BYTES // programs_per_sm // (2 * (64 + width) * depth))
