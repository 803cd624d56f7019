"""Attention kernels on random batches, as the tuner and the bench of kernels run them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from m5_kernels.extras.hopper.prefill_tiles import prefill_tiles
from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode, flash_decode_torch
from m5_kernels.kernels.paged_prefill import paged_prefill, paged_prefill_torch
from m5_kernels.kernels.tiles import DecodeTile, PrefillTile

from .measure import PagedBatch, check, median_us, num_rotations

NUM_Q_HEADS, NUM_KV_HEADS = 16, 8


class Shape(NamedTuple):
    """`num_seqs` sequences whose chunk of `query_len` tokens ends a context of `context_len`."""

    num_seqs: int
    context_len: int
    query_len: int = 1

    @property
    def name(self) -> str:
        """As the tables call it."""
        return f"B{self.num_seqs}xL{self.context_len}"

    def kv_bytes(self, head_dim: int) -> int:
        """Bytes of keys and values in bf16."""
        return self.num_seqs * self.context_len * NUM_KV_HEADS * head_dim * 4

    def batch(self, head_dim: int) -> PagedBatch:
        """A batch of this shape in blocks of 16."""
        lens, queries = [self.context_len] * self.num_seqs, [self.query_len] * self.num_seqs
        return PagedBatch.random(lens, queries, NUM_Q_HEADS, NUM_KV_HEADS, head_dim)

    def batches(self, head_dim: int) -> list[PagedBatch]:
        """As many as it takes that a launch finds none of its inputs in the L2 cache."""
        return [self.batch(head_dim) for _ in range(num_rotations(self.kv_bytes(head_dim)))]

    def speed(self, head_dim: int, microseconds: float) -> float:
        """GB/s of KV read for a decode shape, TFLOP/s (causal) for a prefill shape."""
        if self.query_len == 1:
            return self.kv_bytes(head_dim) / microseconds / 1e3
        pairs = self.num_seqs * self.query_len * (self.context_len - self.query_len / 2)
        return pairs * NUM_Q_HEADS * head_dim * 4 / microseconds / 1e6


DECODE_SHAPES = [
    Shape(256, 1024), Shape(256, 700), Shape(64, 4096), Shape(16, 16384),
    Shape(8, 32768), Shape(1, 131072), Shape(1, 1024),
]  # fmt: skip
PREFILL_SHAPES = [Shape(16, 1024, 1024), Shape(4, 4096, 4096), Shape(1, 16384, 16384)]


def workspace_of(batch: PagedBatch, tile: DecodeTile | None = None) -> DecodeWorkspace:
    """What the decode kernel needs for batches of this shape."""
    num_seqs, num_q_heads, head_dim = batch.query.shape
    keys = batch.key_cache
    return DecodeWorkspace.allocate(
        num_seqs, num_q_heads, keys.shape[2], head_dim, keys.dtype, batch.query.device, tile
    )


def attention_runs(
    tile: DecodeTile | PrefillTile | None, batches: Sequence[PagedBatch]
) -> list[Callable[[], torch.Tensor]]:
    """One launch per batch, for `median_us`; launches of the decode kernel share a workspace.

    tile: None is the kernel for Hopper, which has one tile.
    """
    if tile is None:
        return [hopper_run(batch) for batch in batches]
    if isinstance(tile, DecodeTile):
        workspace = workspace_of(batches[0], tile)
        return [partial(flash_decode, *b.decode_inputs, workspace=workspace) for b in batches]
    return [partial(paged_prefill, *b.decode_inputs, b.query_start_loc, tile=tile) for b in batches]


def hopper_run(batch: PagedBatch) -> Callable[[], torch.Tensor]:
    """Chunks only. Their list of tiles is made before: a step makes one for all of its layers."""
    from m5_kernels.extras.hopper.hopper_prefill import hopper_prefill  # Gluon: NVIDIA's GPUs alone

    query, keys, values, block_table, lens = batch.decode_inputs
    starts, scale, output = batch.query_start_loc, query.shape[-1] ** -0.5, torch.empty_like(query)
    tiles = prefill_tiles(lens, starts, starts[:1], len(query), len(lens))

    def launch() -> torch.Tensor:
        hopper_prefill(query, keys, values, block_table, tiles, scale, output)
        return output

    return launch


def expected(shape: Shape, batch: PagedBatch) -> torch.Tensor:
    """What the torch twin gives; where its score matrix would be too large, another tiling."""
    if shape.query_len == 1:
        return flash_decode_torch(*batch.decode_inputs)
    if shape.context_len <= 4096:
        return paged_prefill_torch(*batch.decode_inputs, batch.query_start_loc)
    return attention_runs(PrefillTile(64, 32, 4, 2), [batch])[0]()


def microseconds(
    shape: Shape, head_dim: int, tiles: Sequence[DecodeTile | PrefillTile | None]
) -> list[float]:
    """Compare what each tile gives with the twin, then time it: microseconds of a launch."""
    batches = shape.batches(head_dim)
    reference, found = expected(shape, batches[0]), []
    for tile in tiles:
        launches = attention_runs(tile, batches)
        check(f"{tile or 'hopper_prefill'} at {shape.name}", launches[0](), reference)
        found.append(median_us(launches))
    return found
