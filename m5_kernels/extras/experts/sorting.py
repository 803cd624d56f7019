"""Sort the rows of a step by expert, so that one product multiplies all that share a weight.

A token that meets `top_k` experts is `top_k` pairs: pair `token * top_k + choice`. Pairs of one
expert come together, in the order of their tokens, padded to whole tiles (vLLM:
`moe_align_block_size`):

    topk_ids       0: (2, 0)   1: (2, 1)   2: (0, 2)      three tokens, two experts each
    tile_experts   [   0    |   1    |   2    |   2    | -1 ...
    sorted_pairs   [ 1  4   | 3  -1  | 0  2   | 5  -1  |          tiles of two rows

How many tiles there are depends on the routing. The most that there can be does not, so a CUDA
graph launches so many programs, and those of absent tiles (-1) return at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.triton_or_twin import next_power_of_2, tl, triton


class SortedPairs(NamedTuple):
    """Tiles of pairs that share an expert."""

    sorted_pairs: torch.Tensor
    """int32 `[max_tiles * rows]`: a pair, or -1 in rows that a tile does not use."""
    tile_experts: torch.Tensor
    """int32 `[max_tiles]`: the expert of each tile; -1: there is no such tile."""


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Return the largest number of tiles: each expert that is met may have one that is not full."""
    return (num_pairs + min(num_pairs, num_experts) * (rows - 1)) // rows


def sort_by_expert(
    topk_ids: torch.Tensor, num_experts: int, rows: int, launch: Launch = PLAIN
) -> SortedPairs:
    """Return the pairs in tiles of so many rows.

    topk_ids: int32 `[num_tokens, top_k]`, contiguous; rows: a power of two.
    """
    if not launch.runs_triton(topk_ids):
        return sort_by_expert_torch(topk_ids, num_experts, rows)
    num_pairs = topk_ids.numel()
    max_tiles = most_tiles(num_pairs, num_experts, rows)
    output = SortedPairs(topk_ids.new_empty(max_tiles * rows), topk_ids.new_empty(max_tiles))
    block = min(16384, max(16, next_power_of_2(num_pairs)))
    launch.kernel(_sort_kernel, (num_experts,))(
        topk_ids, *output,
        num_pairs, max_tiles,
        NUM_EXPERTS=num_experts,
        BINS=next_power_of_2(num_experts + 1),
        ROWS=rows,
        BLOCK=block,
        num_warps=4 if block <= 1024 else 8,
        **launch.pdl_options(),
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_pairs", "max_tiles"])
def _sort_kernel(
    topk_ids, sorted_pairs, tile_experts,
    num_pairs, max_tiles,
    NUM_EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    expert = tl.program_id(0)
    offsets, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    wait_for_previous(PDL)
    counts = tl.zeros([BINS], dtype=tl.int32)
    for start in range(0, num_pairs, BLOCK):
        pairs = start + offsets
        ids = tl.load(topk_ids + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
        counts += tl.histogram(ids, BINS)
    tiles = tl.where(bins < NUM_EXPERTS, (counts + ROWS - 1) // ROWS, 0)
    first = tl.sum(tl.where(bins < expert, tiles, 0), 0)
    num_tiles = tl.sum(tl.where(bins == expert, tiles, 0), 0)
    own_pairs = sorted_pairs + first * ROWS
    num_found = 0
    for start in range(0, num_pairs, BLOCK):
        pairs = start + offsets
        ids = tl.load(topk_ids + pairs, mask=pairs < num_pairs, other=NUM_EXPERTS)
        is_own = (ids == expert).to(tl.int32)
        places = num_found + tl.cumsum(is_own, 0) - 1
        tl.store(own_pairs + places, pairs, mask=is_own > 0)
        num_found += tl.sum(is_own, 0)
    unused = num_found + tl.arange(0, ROWS)
    tl.store(own_pairs + unused, -1, mask=unused < num_tiles * ROWS)
    for start in range(0, num_tiles, 16):
        own = start + tl.arange(0, 16)
        tl.store(tile_experts + first + own, expert, mask=own < num_tiles)
    if expert == NUM_EXPERTS - 1:
        for start in range(first + num_tiles, max_tiles, 16):
            absent = start + tl.arange(0, 16)
            tl.store(tile_experts + absent, -1, mask=absent < max_tiles)


def sort_by_expert_torch(topk_ids: torch.Tensor, num_experts: int, rows: int) -> SortedPairs:
    """Specify `sort_by_expert`. It also leaves -1 in the rows of absent tiles."""
    ids = topk_ids.flatten().long()
    max_tiles = most_tiles(len(ids), num_experts, rows)
    counts = ids.bincount(minlength=num_experts)
    tiles = (counts + rows - 1) // rows
    tile_experts = ids.new_full((max_tiles,), -1, dtype=torch.int32)
    tile_experts[: tiles.sum()] = torch.arange(num_experts).to(ids).repeat_interleave(tiles).int()
    order = ids.argsort(stable=True)
    first_row = (tiles.cumsum(0) - tiles) * rows
    first_pair = counts.cumsum(0) - counts
    places = torch.arange(len(ids)).to(ids) + (first_row - first_pair)[ids[order]]
    sorted_pairs = ids.new_full((max_tiles * rows,), -1, dtype=torch.int32)
    sorted_pairs[places] = order.int()
    return SortedPairs(sorted_pairs, tile_experts)
