"""Times every candidate tile on this GPU and prints the rows of `m5_kernels/kernels/tiles.py`.

    python -m m5_kernels.tools.tune

Each candidate is compiled, which is what takes the time, checked against the torch twin and timed
alone. A row is chosen by the geometric mean of its speed over the shapes.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence

import torch

from m5_kernels.kernels.tiles import DecodeTile, PrefillTile
from milestone_llm.command.cli import Formatter

from .attention_work import DECODE_SHAPES, PREFILL_SHAPES, attention_runs, microseconds
from .measure import PagedBatch, gpu_command

AttentionTile = DecodeTile | PrefillTile


def candidates(kind: str, head_dim: int) -> Sequence[AttentionTile]:
    """Tiles whose stages fit in the shared memory of the programs that share a multiprocessor."""
    if kind == "prefill":
        sizes = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3, 4))
        return [
            PrefillTile(rows, tokens, warps, stages)
            for rows, tokens, warps, stages in sizes
            if (rows + 2 * tokens * stages) * head_dim * 2 < 230_000 and rows // warps >= 16
        ]
    found = []
    for tokens, warps, stages, programs in itertools.product(
        (32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (1, 2, 3, 4)
    ):
        shared = (tokens * head_dim * 2 * 2 * (stages - 1) + 8000) * programs
        if warps * 16 <= tokens <= warps * 32 and 90_000 < shared < 230_000:
            found.append(DecodeTile(tokens, warps, stages, programs))
    return found


def can_run(tile: AttentionTile, batch: PagedBatch) -> bool:
    """Whether this GPU has enough for a candidate; if not, why is printed."""
    try:
        attention_runs(tile, [batch])[0]()
        torch.cuda.synchronize()
    except Exception as error:  # too much shared memory, mostly
        print(f"  {tuple(tile)} left out: {type(error).__name__}: {error}"[:200])
        return False
    return True


def tune(kind: str, head_dim: int) -> None:
    """Compile, check and time the candidates of one kernel at one head_dim; print the winner."""
    shapes = DECODE_SHAPES if kind == "decode" else PREFILL_SHAPES
    batch = shapes[-1].batch(head_dim)
    tiles = [tile for tile in candidates(kind, head_dim) if can_run(tile, batch)]
    speeds: dict[AttentionTile, list[float]] = {tile: [] for tile in tiles}
    for shape in shapes:
        for tile, us in zip(tiles, microseconds(shape, head_dim, tiles), strict=True):
            speeds[tile].append(shape.speed(head_dim, us))
    ranked = sorted(tiles, key=lambda tile: -statistics.geometric_mean(speeds[tile]))
    print(f"{kind} head_dim {head_dim}: " + " ".join(shape.name for shape in shapes))
    for tile in ranked[:5]:
        print(f"  {tuple(tile)!s:20s} " + " ".join(f"{s:7.0f}" for s in speeds[tile]), flush=True)
    print(f"  (2, {head_dim}): {type(ranked[0]).__name__}{tuple(ranked[0])},", flush=True)


def search(args: argparse.Namespace) -> None:
    """Tune what the command line asks for."""
    print(f"tuned on: {torch.cuda.get_device_name()}, torch {torch.__version__}")
    for kind in ("decode", "prefill"):
        for head_dim in args.head_dims:
            if args.kernel in (kind, "all"):
                tune(kind, head_dim)


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m m5_kernels.tools.tune", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("--kernel", choices=["decode", "prefill", "all"], default="all")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    return gpu_command(parser, search)


if __name__ == "__main__":
    sys.exit(main())
