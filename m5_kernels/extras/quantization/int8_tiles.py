"""Tiles of linear layers with weights in 8 bits, chosen on an H200 like those of `gpu_tiles`."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from m5_kernels.kernels.gpu_tiles import GPU
from m5_kernels.kernels.tiles import LinearTile


class Int8Tile(NamedTuple):
    """How a program covers a linear layer with an int8 weight."""

    columns: int  # outputs
    rows: int  # tokens
    depth: int  # inputs at a time
    num_warps: int
    num_stages: int


def skinny_int8_tile(out_size: int, in_size: int) -> LinearTile:
    """Return the tile for one row, like `linear_tile`. More columns share the loads of the row."""
    if in_size > 16384:
        return LinearTile(4, 2048, 4)
    is_wide = out_size >= 8192 and 2048 < in_size < 4096
    return LinearTile(4, 512, 1) if is_wide else LinearTile(4, 1024, 2)


@functools.cache
def int8_tile(num_tokens: int, element_size: int, device: torch.device) -> Int8Tile:
    """Return the tile for more than a few rows."""
    if element_size > 2:
        return Int8Tile(32, 32, 64, 4, 2)
    if num_tokens <= 16:
        return Int8Tile(32, 16, 256, 2, 4)
    if num_tokens <= 64:
        fits = device.type != "cuda" or GPU.of(device).shared_bytes >= 80 * 1024  # MI300 has 64 KiB
        return Int8Tile(32, 32, 256, 4, 4 if fits else 3)
    return Int8Tile(64, 64, 128, 4, 3)
