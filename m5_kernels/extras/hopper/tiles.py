"""Tiles of the products of few rows, chosen on an H200 as those of `kernels.tiles`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from m5_kernels.kernels.backend import ceil_div, next_power_of_2, num_multiprocessors
from m5_kernels.kernels.tiles import GPU, SCRATCH_BYTES, LinearTile


class DotTile(NamedTuple):
    """How a program walks a matrix product of a few rows on tensor cores."""

    columns: int  # outputs
    depth: int  # inputs at a time
    num_warps: int
    num_stages: int  # tiles in flight


class HopperTile(NamedTuple):
    """How a program covers a matrix product of 64 rows with a weight of two bytes, on Hopper."""

    columns: int  # outputs; with a gate, as many of gate and up each
    depth: int  # inputs at a time
    num_stages: int  # of so many inputs, on their way


SHORT_ROW = 1024
"""Elements of a row of a weight, up to which many rows take tensor cores already for one token."""
NUM_SMS = 132
"""Of an H200. Programs that share a tile run at once there."""
ENOUGH_PROGRAMS = 96
RING_BYTES = 192 * 1024
"""Of a multiprocessor's shared memory: what the copy engine fills; the rest is for results."""


def register_tile(in_size: int) -> LinearTile:
    """The tile of a matrix product of up to 16 rows whose weight is kept in registers.

    With longer rows more warps share one, or there would not be registers enough.
    """
    if in_size > 1024:
        return LinearTile(16, 512, 4)
    return LinearTile(16, max(64, min(1024, next_power_of_2(in_size))), 2)


@functools.cache
def dot_tile(out_size: int, device: torch.device) -> DotTile:
    """The tile of a matrix product of up to 16 rows on tensor cores, of two bytes each.

    Where programs are few, each has more on its way. Where they are many, two share a
    multiprocessor, and so do the last of a product and the first of the next.
    """
    tile = DotTile(64, 128, 4, 4)
    if device.type != "cuda":
        return tile
    if 2 * out_size <= num_multiprocessors(device) * tile.columns:
        tile = tile._replace(num_stages=6)
    return fit_dot(tile, GPU.of(device))


def fit_dot(tile: DotTile, gpu: GPU) -> DotTile:
    """A tile that fits: fewer stages."""
    stage_bytes = 2 * tile.depth * (tile.columns + 16)
    most = (gpu.shared_bytes - SCRATCH_BYTES) // stage_bytes
    return tile._replace(num_stages=max(1, min(tile.num_stages, most)))


def hopper_tile(num_tokens: int, size: int, is_gated: bool) -> HopperTile:
    """The tile of `hopper_linear`: the narrowest that all run at once, with what fits on its way.

    size: outputs, with a gate half of them.
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
