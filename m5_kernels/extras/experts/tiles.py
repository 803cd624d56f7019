"""Tiles of the products of experts, chosen on an H200 like those of `kernels.gpu_tiles`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from m5_kernels.kernels.gpu_tiles import GPU, SCRATCH_BYTES


class GroupedTile(NamedTuple):
    """How a program covers the product of one expert."""

    rows: int  # pairs of a token and an expert
    columns: int  # outputs; with a gate, as many of gate and up each
    depth: int  # inputs at a time
    num_warps: int
    num_stages: int  # of so many inputs, in flight


class GroupedTiles(NamedTuple):
    """The tiles of both products of a layer. They have the same number of rows."""

    gate_up: GroupedTile
    down: GroupedTile


H200_GROUPED = (
    (1, GroupedTiles(GroupedTile(16, 64, 128, 4, 4), GroupedTile(16, 64, 128, 4, 3))),
    (10, GroupedTiles(GroupedTile(16, 64, 128, 4, 3), GroupedTile(16, 128, 128, 8, 3))),
    (24, GroupedTiles(GroupedTile(32, 64, 64, 4, 4), GroupedTile(32, 64, 128, 4, 3))),
    (64, GroupedTiles(GroupedTile(64, 64, 64, 4, 4), GroupedTile(64, 128, 64, 4, 4))),
)
"""Most pairs of an expert, on average, for which tiles are the best."""
H200_MANY_PAIRS = GroupedTiles(GroupedTile(128, 128, 64, 8, 4), GroupedTile(128, 256, 64, 8, 3))


@functools.cache
def grouped_tiles(
    num_pairs: int, num_experts: int, dtype: torch.dtype, device: torch.device
) -> GroupedTiles:
    """Return the tiles for so many pairs of a token and an expert."""
    mean = num_pairs / min(num_pairs, num_experts) if num_pairs else 0
    tiles = next((tiles for most, tiles in H200_GROUPED if mean <= most), H200_MANY_PAIRS)
    if device.type != "cuda":
        return tiles
    gpu = GPU.of(device)
    return GroupedTiles(
        fit(tiles.gate_up, dtype.itemsize, gpu, 2), fit(tiles.down, dtype.itemsize, gpu, 1)
    )


def fit(tile: GroupedTile, element_size: int, gpu: GPU, num_weights: int) -> GroupedTile:
    """Return a tile that fits: with less depth, then fewer stages, then fewer outputs.

    num_weights: 2 if gate and up are multiplied together, else 1.
    """

    def is_too_large(tile: GroupedTile) -> bool:
        num_rows = tile.rows + num_weights * tile.columns
        shared_bytes = num_rows * tile.depth * tile.num_stages * element_size
        return shared_bytes + SCRATCH_BYTES > gpu.shared_bytes

    while is_too_large(tile) and tile.depth > 32:
        tile = tile._replace(depth=tile.depth // 2)
    while is_too_large(tile) and tile.num_stages > 2:
        tile = tile._replace(num_stages=tile.num_stages - 1)
    while is_too_large(tile) and tile.columns > 32:
        tile = tile._replace(columns=tile.columns // 2)
    return tile
