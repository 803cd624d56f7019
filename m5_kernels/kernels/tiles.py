"""Tile choices, by GPU: what `python -m m5_kernels.tools.tune` found fastest, and a safe default.

A tile trades bytes in flight (large tiles, many stages) against shared memory and registers
(small tiles, several programs on a multiprocessor). Nothing else depends on these numbers:
any row of the table gives the same results up to rounding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .backend import device_name


class DecodeTile(NamedTuple):
    """How Flash-Decoding walks a context."""

    tokens: int  # KV tokens a program loads at once
    num_warps: int
    num_stages: int  # tiles in flight
    programs_per_sm: int


class PrefillTile(NamedTuple):
    """How a prefill program covers the score matrix."""

    rows: int  # query rows (tokens x heads of a group)
    tokens: int  # KV tokens
    num_warps: int
    num_stages: int


class LinearTile(NamedTuple):
    """Which part of the weight a program of the skinny matrix product reads."""

    columns: int  # outputs
    depth: int  # inputs at a time
    num_warps: int


# Tuned on: NVIDIA H200 (132 multiprocessors, 227 KiB shared memory each), torch 2.11, triton 3.6.
# Key: (element size in bytes, padded head_dim).
H200_DECODE = {
    (2, 64): DecodeTile(64, 2, 3, 4),
    (2, 128): DecodeTile(64, 2, 2, 4),
    (2, 256): DecodeTile(64, 2, 2, 2),
}
H200_PREFILL = {
    (2, 64): PrefillTile(128, 64, 8, 4),
    (2, 128): PrefillTile(128, 128, 8, 2),
    (2, 256): PrefillTile(128, 64, 8, 2),
}


def decode_tile(head_dim_pad: int, dtype: torch.dtype, device: torch.device) -> DecodeTile:
    """The Flash-Decoding tile for a padded head_dim, a cache dtype and a GPU."""
    element_size = dtype.itemsize
    if "H200" in device_name(device) and (element_size, head_dim_pad) in H200_DECODE:
        return H200_DECODE[element_size, head_dim_pad]
    # Two stages of K and V within 64 KiB, which every GPU that Triton supports has.
    tokens = 64 * 1024 // (2 * 2 * head_dim_pad * element_size)
    return DecodeTile(max(16, min(64, tokens)), 4, 2, 2)


def prefill_tile(head_dim_pad: int, dtype: torch.dtype, device: torch.device) -> PrefillTile:
    """The prefill tile for a padded head_dim, a cache dtype and a GPU."""
    element_size = dtype.itemsize
    if "H200" in device_name(device) and (element_size, head_dim_pad) in H200_PREFILL:
        return H200_PREFILL[element_size, head_dim_pad]
    tokens = 64 * 1024 // (2 * 2 * head_dim_pad * element_size)
    return PrefillTile(64 if head_dim_pad <= 128 else 32, max(16, min(64, tokens)), 4, 2)


def linear_tile() -> LinearTile:
    """The tile of a matrix product with a few rows, near the best for every weight tried."""
    return LinearTile(2, 1024, 4)
