"""Flash-Decoding's split and merge on numbers small enough to read: lists, one head, no kernel.

The steps are those of `kernels/flash_decode.py`, with one function for each thing that a program
does there: shares of tiles, partial sums with their log-sum-exp, and the merge in program order.
Exponents are powers of two, as in the kernel, where a power of e would cost one more product.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class KVSplit:
    """The part of one sequence that one program computes: tiles from `first_tile` to `end_tile -
    1`."""

    program: int
    seq: int
    first_tile: int
    end_tile: int


@dataclass(frozen=True)
class Partial:
    """Attention over a split: normalised output, and log2 of the sum of exponentials."""

    output: float
    lse: float


def split(context_lens: list[int], tile: int, num_programs: int) -> list[KVSplit]:
    """Put the KV tiles of all sequences in a row and cut it into equal shares.

    Args:
        context_lens: tokens of each sequence.
        tile: tokens of a tile.
    """
    counts = [max(1, math.ceil(length / tile)) for length in context_lens]
    total = sum(counts)
    num_programs = min(num_programs, total)
    kv_splits = []
    for program in range(num_programs):
        share_start = program * total // num_programs
        share_end = (program + 1) * total // num_programs
        seq_start = 0
        for seq, count in enumerate(counts):
            begin, end = max(share_start, seq_start), min(share_end, seq_start + count)
            if begin < end:
                kv_splits.append(KVSplit(program, seq, begin - seq_start, end - seq_start))
            seq_start += count
    return kv_splits


def attend_split(scores: list[float], values: list[float], kv_split: KVSplit, tile: int) -> Partial:
    """Compute online softmax over the tiles of a split, in one pass for all scores.

    Args:
        scores: those of the whole sequence, in log2; values: a number a token instead of a vector.
    """
    row_max, row_sum, accumulator = -math.inf, 0.0, 0.0
    for index in range(kv_split.first_tile, kv_split.end_tile):
        tokens = range(index * tile, min((index + 1) * tile, len(scores)))
        row_max, row_sum, accumulator = add_tile(
            row_max,
            row_sum,
            accumulator,
            [scores[token] for token in tokens],
            [values[token] for token in tokens],
        )
    return Partial(accumulator / row_sum, row_max + math.log2(row_sum))


def add_tile(
    row_max: float, row_sum: float, accumulator: float, scores: list[float], values: list[float]
) -> tuple[float, float, float]:
    """Add one tile. The sum so far, with an older maximum, is scaled down."""
    new_max = max(row_max, *scores)
    rescale = 2 ** (row_max - new_max)
    weights = [2 ** (score - new_max) for score in scores]
    row_sum = row_sum * rescale + sum(weights)
    accumulator *= rescale
    accumulator += sum(weight * value for weight, value in zip(weights, values, strict=True))
    return new_max, row_sum, accumulator


def merge(partials: list[Partial]) -> float:
    """Weight the partial outputs of a sequence by 2**lse, their shares of the softmax's sum."""
    top = max(partial.lse for partial in partials)
    weights = [2 ** (partial.lse - top) for partial in partials]
    total = sum(w * part.output for w, part in zip(weights, partials, strict=True))
    return total / sum(weights)


def flash_decode(
    scores: list[list[float]], values: list[list[float]], tile: int, num_programs: int
) -> list[float]:
    """Compute attention of each sequence's newest token: every program's splits, then the
    merges."""
    lens = [len(each) for each in scores]
    partials: dict[int, list[Partial]] = {seq: [] for seq in range(len(lens))}
    for kv_split in split(lens, tile, num_programs):
        partial = attend_split(scores[kv_split.seq], values[kv_split.seq], kv_split, tile)
        partials[kv_split.seq].append(partial)
    return [parts[0].output if len(parts) == 1 else merge(parts) for parts in partials.values()]


def softmax_attention(scores: list[float], values: list[float]) -> float:
    """Compute the expected result directly."""
    weights = [2**score for score in scores]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def main() -> None:
    """Print the partial results of each program for contexts of 10, 3 and 7 tokens, and the merged
    ones."""
    lens, tile, num_programs = [10, 3, 7], 2, 4
    scores = [[float((3 * token + seq) % 4) for token in range(n)] for seq, n in enumerate(lens)]
    values = [[float(token) for token in range(n)] for n in lens]
    print("program   sequence   its tiles   output     log2 of its sum")
    for each in split(lens, tile, num_programs):
        part = attend_split(scores[each.seq], values[each.seq], each, tile)
        tiles = f"{each.first_tile} to {each.end_tile - 1}"
        print(f"{each.program:7}{each.seq:11}{tiles:>12}{part.output:9.4f}{part.lse:12.4f}")
    merged = flash_decode(scores, values, tile, num_programs)
    whole = map(softmax_attention, scores, values)
    print("\nmerged      ", [round(output, 6) for output in merged])
    print("all at once ", [round(output, 6) for output in whole])


if __name__ == "__main__":
    main()
