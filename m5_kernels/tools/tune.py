"""`python -m m5_kernels.tune`: times every candidate tile on this GPU and prints the table's rows.

Candidates are compiled first, in parallel processes (compiling is what takes the time), then each
is checked against the torch twin and timed alone. A row is chosen by the geometric mean of its
speed over the shapes. `--details` prints every time measured.
"""

from __future__ import annotations

import argparse
import itertools
import math
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode, flash_decode_torch
from m5_kernels.kernels.paged_prefill import paged_prefill, paged_prefill_torch
from m5_kernels.kernels.skinny_linear import skinny_linear
from m5_kernels.kernels.tiles import DecodeTile, LinearTile, PrefillTile

from .measure import PagedBatch, median_us, num_rotations, relative_error


class Shape(NamedTuple):
    """`num_seqs` sequences whose chunk of `query_len` tokens ends a context of `context_len`."""

    num_seqs: int
    context_len: int
    query_len: int = 1

    @property
    def name(self) -> str:
        """As the tables call it."""
        return f"B{self.num_seqs}xL{self.context_len}"


DECODE_SHAPES = [
    Shape(256, 1024), Shape(256, 700), Shape(64, 4096), Shape(16, 16384),
    Shape(8, 32768), Shape(1, 131072), Shape(1, 1024),
]  # fmt: skip
PREFILL_SHAPES = [Shape(16, 1024, 1024), Shape(4, 4096, 4096), Shape(1, 16384, 16384)]
MAX_ERROR = 1e-2  # of bf16 operands against fp32 ones


def decode_candidates(head_dim: int) -> list[DecodeTile]:
    """Tiles whose stages fit in the shared memory of the programs that share a multiprocessor."""
    found = []
    for tokens, warps, stages, programs in itertools.product(
        (32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (1, 2, 3, 4)
    ):
        shared = (tokens * head_dim * 2 * 2 * (stages - 1) + 8000) * programs
        if warps * 16 <= tokens <= warps * 32 and 90_000 < shared < 230_000:
            found.append(DecodeTile(tokens, warps, stages, programs))
    return found


def prefill_candidates(head_dim: int) -> list[PrefillTile]:
    """Tiles whose stages fit in a multiprocessor's shared memory."""
    return [
        PrefillTile(rows, tokens, warps, stages)
        for rows, tokens, warps, stages in itertools.product(
            (64, 128), (32, 64, 128), (4, 8), (2, 3, 4)
        )
        if (rows * head_dim + 2 * tokens * head_dim * stages) * 2 < 230_000 and rows // warps >= 16
    ]


def decode_run(tile: DecodeTile, shape: Shape, head_dim: int, batches: list[PagedBatch]) -> list:
    """One closure per batch, sharing a workspace, for `median_us`."""
    query, keys = batches[0].query, batches[0].key_cache
    workspace = DecodeWorkspace.allocate(
        shape.num_seqs, query.shape[1], keys.shape[2], head_dim, keys.dtype, query.device, tile
    )
    return [
        lambda b=batch: flash_decode(
            b.query, b.key_cache, b.value_cache, b.block_table, b.context_lens, workspace=workspace
        )
        for batch in batches
    ]


def prefill_run(tile: PrefillTile, batches: list[PagedBatch]) -> list:
    """One closure per batch, for `median_us`."""
    return [
        lambda b=batch: paged_prefill(
            b.query, b.key_cache, b.value_cache, b.block_table, b.context_lens, b.query_start_loc,
            tile=tile,
        )
        for batch in batches
    ]  # fmt: skip


def compile_one(tile: DecodeTile | PrefillTile, shape: Shape, head_dim: int) -> str | None:
    """Compile a candidate into triton's cache on disk; returns why it can't run, if it can't."""
    batch = random_batch(shape, head_dim, num_blocks=64)
    try:
        if isinstance(tile, DecodeTile):
            decode_run(tile, shape, head_dim, [batch])[0]()
        else:
            prefill_run(tile, [batch])[0]()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, mostly
        return f"{type(error).__name__}: {error}"[:200]
    return None


def random_batch(shape: Shape, head_dim: int, num_blocks: int | None = None) -> PagedBatch:
    """A `PagedBatch` of a shape, with 16 query heads, 8 KV heads and blocks of 16."""
    lens = [shape.context_len] * shape.num_seqs
    return PagedBatch.random(
        lens, [shape.query_len] * shape.num_seqs, head_dim=head_dim, num_blocks=num_blocks
    )


def speed(
    shape: Shape, head_dim: int, microseconds: float, num_q_heads: int, num_kv_heads: int
) -> float:
    """GB/s of KV read for a decode shape, TFLOP/s (causal) for a prefill shape."""
    if shape.query_len == 1:
        return shape.num_seqs * shape.context_len * num_kv_heads * head_dim * 4 / microseconds / 1e3
    pairs = shape.num_seqs * shape.context_len**2 / 2
    return pairs * num_q_heads * head_dim * 4 / microseconds / 1e6


def tune(kind: str, head_dim: int, details: bool) -> None:
    """Compile, check and time the candidates of one kernel at one head_dim; print the winner."""
    shapes = DECODE_SHAPES if kind == "decode" else PREFILL_SHAPES
    candidates: list = (decode_candidates if kind == "decode" else prefill_candidates)(head_dim)
    work = list(itertools.product(candidates, shapes))
    # A fresh interpreter each: a process that has used CUDA can't fork.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), mp_context=context) as pool:
        reasons = list(
            pool.map(compile_one, *zip(*[(t, s, head_dim) for t, s in work], strict=True))
        )
    broken = {tile: reason for (tile, _), reason in zip(work, reasons, strict=True) if reason}
    for tile, reason in broken.items():
        print(f"  {tuple(tile)} left out: {reason}")
    speeds: dict = {tile: [] for tile in candidates if tile not in broken}
    for shape in shapes:
        rotations = num_rotations(shape.num_seqs * shape.context_len * 8 * head_dim * 4)
        batches = [random_batch(shape, head_dim) for _ in range(rotations)]
        b = batches[0]
        arguments = (b.query, b.key_cache, b.value_cache, b.block_table, b.context_lens)
        if kind == "decode":
            reference = flash_decode_torch(*arguments)
        elif shape.context_len <= 4096:
            reference = paged_prefill_torch(*arguments, b.query_start_loc)
        else:  # the twin's score matrix would be too large
            reference = prefill_run(PrefillTile(64, 32, 4, 2), [b])[0]()
        for tile in speeds:
            if kind == "decode":
                launches = decode_run(tile, shape, head_dim, batches)
            else:
                launches = prefill_run(tile, batches)
            error = relative_error(launches[0](), reference)
            if not error < MAX_ERROR:
                raise RuntimeError(f"{tile} at {shape.name}: relative error {error}")
            heads, kv_heads = b.query.shape[1], b.key_cache.shape[2]
            speeds[tile].append(speed(shape, head_dim, median_us(launches), heads, kv_heads))
        del batches, b, arguments, reference
    means = {t: math.exp(sum(map(math.log, s)) / len(s)) for t, s in speeds.items()}
    best = max(means, key=lambda tile: means[tile])
    print(f"{kind} head_dim {head_dim}: " + " ".join(shape.name for shape in shapes))
    for tile in sorted(means, key=lambda tile: -means[tile])[: None if details else 5]:
        print(f"  {tuple(tile)!s:20s} " + " ".join(f"{s:7.0f}" for s in speeds[tile]), flush=True)
    print(f"  (2, {head_dim}): {type(best).__name__}{tuple(best)},", flush=True)


def tune_linear() -> None:
    """Time candidates for one-row products with the weights of a Qwen3-0.6B layer and LM head."""
    candidates = [
        LinearTile(columns, depth, warps)
        for columns, depth, warps in itertools.product((1, 2, 4, 8), (256, 512, 1024), (1, 2, 4))
    ]
    times: dict[LinearTile, list[float]] = {tile: [] for tile in candidates}
    sizes = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (151_936, 1024)]
    for out_size, in_size in sizes:
        hidden = torch.randn(1, in_size, device="cuda").bfloat16()
        weights = [
            torch.randn(out_size, in_size, device="cuda").bfloat16()
            for _ in range(num_rotations(out_size * in_size * 2))
        ]
        for tile in candidates:
            error = relative_error(
                skinny_linear(hidden, weights[0], tile=tile), hidden @ weights[0].T
            )
            if not error < MAX_ERROR:
                raise RuntimeError(f"{tile} at {out_size}x{in_size}: relative error {error}")
            launches = [partial(skinny_linear, hidden, weight, tile=tile) for weight in weights]
            times[tile].append(median_us(launches, repeats=3, min_us=2e3))
    print("linear, us: " + " ".join(f"{out_size}x{in_size}" for out_size, in_size in sizes))
    for tile in sorted(candidates, key=lambda tile: math.prod(times[tile]))[:5]:
        print(f"  {tuple(tile)!s:20s} " + " ".join(f"{us:7.1f}" for us in times[tile]))


def main() -> None:
    """Tune what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=["decode", "prefill", "linear", "all"], default="all")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--details", action="store_true")
    options = parser.parse_args()
    print(f"tuned on: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for kind in ("decode", "prefill"):
        for head_dim in options.head_dims:
            if options.kernel in (kind, "all"):
                tune(kind, head_dim, options.details)
    if options.kernel in ("linear", "all"):
        tune_linear()


if __name__ == "__main__":
    main()
