"""Tile choices: the fastest of all that were timed on one GPU, made smaller for other GPUs.

A tile is a trade between bytes in flight (large tiles, many stages) and shared memory and registers
(small tiles, several programs on a multiprocessor). The table was measured on an H200, which gets
its rows unchanged: they are the best on average for many short contexts and few long ones. A GPU
with less shared memory gets the nearest tile that fits its own limits. How fast that is has not
been tried. Nothing else depends on these numbers: any tile gives the same results up to rounding.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeVar

import torch

from .tiles import DecodeTile, LinearTile, PrefillTile


class GPU(NamedTuple):
    """The limits of a tile. On AMD's GPUs shared memory is called LDS, and a warp a wavefront."""

    shared_bytes: int
    """Shared memory that one program may have."""
    shared_bytes_per_sm: int
    """Shared memory of a multiprocessor, for all programs on it."""
    num_registers: int
    """32-bit registers of a multiprocessor."""
    warp_size: int

    @classmethod
    def of(cls, device: torch.device) -> GPU:
        """Return the limits of a CUDA or ROCm device."""
        found = torch.cuda.get_device_properties(device)
        shared = found.shared_memory_per_block
        return cls(
            max(shared, getattr(found, "shared_memory_per_block_optin", 0)),
            max(shared, getattr(found, "shared_memory_per_multiprocessor", 0)),
            getattr(found, "regs_per_multiprocessor", 65536),
            found.warp_size,
        )


@functools.cache
def most_warps(device: torch.device) -> int:
    """Return the most warps of a program. It has 1,024 threads at most; AMD's warps may have 64."""
    return 1024 // (GPU.of(device).warp_size if device.type == "cuda" else 32)


Tile = TypeVar("Tile", DecodeTile, PrefillTile)

# Tuned on: NVIDIA H200 (132 multiprocessors, 227 KiB shared memory each), torch 2.11, triton 3.6.
# Key: (element size in bytes, padded head_dim).
H200_DECODE = {
    (1, 128): DecodeTile(32, 1, 3, 8),
    (2, 64): DecodeTile(64, 2, 3, 4),
    (2, 128): DecodeTile(64, 2, 2, 4),
    (2, 256): DecodeTile(64, 2, 2, 2),
}
H200_PREFILL = {
    (1, 128): PrefillTile(128, 128, 8, 2),
    (2, 64): PrefillTile(128, 64, 8, 4),
    (2, 128): PrefillTile(128, 128, 8, 2),
    (2, 256): PrefillTile(128, 64, 8, 2),
}
H200_LINEAR = (
    (2560, LinearTile(2, 512, 2)),
    (4096, LinearTile(2, 1024, 4)),
    (6144, LinearTile(2, 1024, 2)),
    (16384, LinearTile(2, 2048, 4)),
)
"""Most elements of a row of the weight for which a tile is the best, and the tile."""
SCRATCH_BYTES = 2048
"""Shared memory that reductions need in addition to a tile, at most."""
MAX_REGISTERS = 192
"""Registers of a thread for scores and sums; of its 255, addresses and operands need some."""


@functools.cache
def decode_tile(head_dim_pad: int, dtype: torch.dtype, device: torch.device) -> DecodeTile:
    """Return the Flash-Decoding tile for a padded head_dim, a cache dtype and a GPU."""
    # Two stages of K and V within 64 KiB, if nothing was tuned, and under the interpreter.
    tokens = max(16, min(64, 64 * 1024 // (2 * 2 * head_dim_pad * dtype.itemsize)))
    tile = DecodeTile(tokens, 4, 2, 2)
    if device.type != "cuda":
        return tile
    tile = H200_DECODE.get((dtype.itemsize, head_dim_pad), tile)
    return with_warps(fit_decode(tile, 2 * head_dim_pad * dtype.itemsize, GPU.of(device)), device)


@functools.cache
def prefill_tile(head_dim_pad: int, dtype: torch.dtype, device: torch.device) -> PrefillTile:
    """Return the prefill tile for a padded head_dim, a cache dtype and a GPU."""
    tokens = max(16, min(64, 64 * 1024 // (2 * 2 * head_dim_pad * dtype.itemsize)))
    tile = PrefillTile(64 if head_dim_pad <= 128 else 32, tokens, 4, 2)
    if device.type != "cuda":
        return tile
    tile = H200_PREFILL.get((dtype.itemsize, head_dim_pad), tile)
    return with_warps(fit_prefill(tile, head_dim_pad, dtype.itemsize, GPU.of(device)), device)


def with_warps(tile: Tile, device: torch.device) -> Tile:
    """Return the tile with at least eight warps on AMD GPUs whose wavefronts have 32 lanes.

    They hold a tile's keys and values in registers, and fewer warps do not have enough.
    """
    is_narrow = torch.version.hip is not None and GPU.of(device).warp_size == 32
    return tile._replace(num_warps=max(8, tile.num_warps)) if is_narrow else tile


def fit_decode(tile: DecodeTile, token_bytes: int, gpu: GPU) -> DecodeTile:
    """Return a tile that fits: with fewer stages, then fewer tokens, then fewer programs per SM.

    token_bytes: size of one token's key and value in one KV head.
    """

    def shared_bytes(tile: DecodeTile) -> int:
        return tile.num_stages * tile.tokens * token_bytes + SCRATCH_BYTES

    while shared_bytes(tile) > gpu.shared_bytes and tile.num_stages > 2:
        tile = tile._replace(num_stages=tile.num_stages - 1)
    while shared_bytes(tile) > gpu.shared_bytes and tile.tokens > 16:
        tile = tile._replace(tokens=tile.tokens // 2)
    if shared_bytes(tile) > gpu.shared_bytes:  # the smallest tile of the widest heads in fp32
        tile = tile._replace(num_stages=1)
    # The tile that is being computed is in registers, so one stage less is in shared memory.
    resident = max(1, tile.num_stages - 1) * tile.tokens * token_bytes + SCRATCH_BYTES
    num_programs = max(1, min(tile.programs_per_sm, gpu.shared_bytes_per_sm // resident))
    return tile._replace(programs_per_sm=num_programs)


def fit_prefill(tile: PrefillTile, head_dim_pad: int, element_size: int, gpu: GPU) -> PrefillTile:
    """Return a tile that fits: with fewer stages, then fewer KV tokens, then fewer query rows."""

    def is_too_large(tile: PrefillTile) -> bool:
        num_vectors = tile.rows + 2 * tile.num_stages * tile.tokens
        shared_bytes = num_vectors * head_dim_pad * element_size + SCRATCH_BYTES
        num_sums = tile.rows * (head_dim_pad + tile.tokens)  # fp32: output and scores
        num_registers = min(gpu.num_registers, MAX_REGISTERS * tile.num_warps * gpu.warp_size)
        return shared_bytes > gpu.shared_bytes or num_sums > num_registers

    while is_too_large(tile) and tile.num_stages > 2:
        tile = tile._replace(num_stages=tile.num_stages - 1)
    while is_too_large(tile) and tile.tokens > 32:
        tile = tile._replace(tokens=tile.tokens // 2)
    while is_too_large(tile) and tile.rows > 16:
        tile = tile._replace(rows=tile.rows // 2, num_warps=min(tile.num_warps, 4))
    while is_too_large(tile) and tile.tokens > 16:
        tile = tile._replace(tokens=tile.tokens // 2)
    return tile._replace(num_stages=1) if is_too_large(tile) else tile


def linear_tile(in_size: int) -> LinearTile:
    """Return the tile of a linear layer with one row: the best on average for its length.

    Thirteen tiles were tried with weights of models from 0.6B to 70B. Why a tile suits a length
    depends on the compiler: it makes a program load as many parts at once as there are registers
    for.
    """
    return next((tile for most, tile in H200_LINEAR if in_size <= most), LinearTile(2, 1024, 4))
