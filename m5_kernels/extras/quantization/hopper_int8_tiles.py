"""How programs of `hopper_int8` cover a linear layer: the possible tiles, and the fastest of them.

    side by side, 3 x 1         in turn, 1 x 4
    |  64 |  64 |  64 |         |  64 |        outputs of a warpgroup
    +-----+-----+-----+         +-----+
    |  A  |  B  |  C  | rows    | A+B | rows
    |     |     |     |         | C+D |
    steps 0 1 2 ...             A: 0 4 ..  B: 1 5 ..  C: 2 6 ..  D: 3 7 ..

Converting bytes to bf16 is a long chain of short instructions. A warpgroup spends more time on it
than the tensor cores need. So a program has three or four warpgroups, or two if the sums of many
rows leave no registers. Side by side they share the rows: that is for weights with many outputs.
Otherwise they take steps in turn. Then a program has only 64 outputs, and there are enough programs
for all multiprocessors.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from m5_kernels.extras.devices.few_rows_tiles import NUM_SMS
from m5_kernels.kernels.triton_or_twin import ceil_div

COPY_REGISTERS = 32
"""Registers of a thread that only starts copies."""


class HopperInt8Tile(NamedTuple):
    """The part of a linear layer that a program computes, and how its warpgroups share it."""

    rows: int  # tokens: a power of two, or 1.5 or 1.25 times one
    side_by_side: int  # warpgroups, each with 64 outputs of its own
    turns: int  # warpgroups with the same outputs
    depth: int  # inputs of a step
    num_stages: int  # steps in flight, as many for each turn
    num_parts: int = 1  # parts of the inputs: programs with the same outputs

    @property
    def wide(self) -> int:
        """Rows that are multiplied together: a power of two. The rest is one more product."""
        return 1 << self.rows.bit_length() - 1

    @property
    def registers(self) -> tuple[int, int]:
        """Registers of a thread when a program starts, and later of a thread that multiplies.

        No more than needed, so that a program of another kernel has room on the same
        multiprocessor.
        """
        needed = self.rows // 2 + self.depth // 4 + 48  # sums, integers, addresses
        warps = 4 * self.side_by_side * self.turns
        mean = ceil_div(needed * warps + 4 * COPY_REGISTERS, warps + 4)
        mean = ceil_div(max(mean, self.wide // 2 + 30), 8) * 8  # 30: of a matrix instruction
        return mean, min(((warps + 4) * mean - 4 * COPY_REGISTERS) // warps // 8 * 8, 232)

    def grid(self, num_tokens: int, size: int, is_gated: bool) -> tuple[int, int]:
        """Return the number of tiles over the rows, and over the outputs.

        size: outputs, or half of them with a gate.
        """
        columns = 64 * self.side_by_side // (1 + is_gated)
        return ceil_div(num_tokens, self.rows), ceil_div(size, columns)


IN_TURN_16 = HopperInt8Tile(16, 1, 4, 128, 12)
IN_TURN_32 = HopperInt8Tile(32, 1, 4, 128, 8)
IN_TURN_64 = HopperInt8Tile(64, 1, 4, 64, 12)
IN_TURN_128 = HopperInt8Tile(128, 1, 3, 64, 6)
H200_INT8 = (
    HopperInt8Tile(16, 3, 1, 128, 7),
    HopperInt8Tile(32, 3, 1, 128, 6),
    HopperInt8Tile(64, 3, 1, 128, 4),
    HopperInt8Tile(96, 3, 1, 64, 7),
    HopperInt8Tile(128, 3, 1, 64, 6),
    HopperInt8Tile(160, 3, 1, 64, 5),
    HopperInt8Tile(192, 3, 1, 64, 4),
    HopperInt8Tile(128, 2, 1, 128, 4),
    HopperInt8Tile(256, 2, 1, 64, 4),
    IN_TURN_16,
    IN_TURN_32,
    IN_TURN_64,
    IN_TURN_128,
)
"""The tiles that were the fastest for some of Qwen3's shapes on an H200."""

FEW_OUTPUTS = (
    # tile, from so many inputs on, up to so many programs
    (IN_TURN_32._replace(num_parts=2), 4096, NUM_SMS),
    (IN_TURN_64._replace(num_parts=2), 8192, NUM_SMS),
    (IN_TURN_128._replace(num_parts=2), 8192, NUM_SMS),
    (IN_TURN_32, 3072, 112),
    (IN_TURN_32, 0, 80),
    (IN_TURN_64, 0, 96),
    (IN_TURN_64, 2048, NUM_SMS),
    (IN_TURN_128, 0, 96),
    (IN_TURN_16._replace(num_parts=3), 3072, NUM_SMS),
    (IN_TURN_16._replace(num_parts=2), 4096, NUM_SMS),
    (IN_TURN_16, 0, NUM_SMS),
)
"""Tiles whose warpgroups take turns, for few outputs, where each program has a multiprocessor to
itself. The first that fits is used.

The table was made for QKV, output and down of Qwen3-8B's and Qwen3-0.6B's shapes, and the smaller
model's gate and up, from tiles that were tried on an H200 with 16 to 256 rows
(docs/reference/m5_measured.md). Steps with the chosen tiles are in
docs/measurements/m5_eight_bits_steps.md. Other shapes were not tried.
"""
MOST_INPUTS = 12288
"""Most inputs of these shapes. With more, it pays off to cut them into more parts."""


def hopper_int8_tile(
    num_tokens: int, size: int, in_size: int, is_gated: bool = False
) -> HopperInt8Tile:
    """Return the tile that is expected to be the fastest. size: as in `grid`.

    Inputs are cut into parts if that gives more multiprocessors something to do.
    """
    return _hopper_int8_tile(rounded(num_tokens), size, in_size, is_gated)


def rounded(num_tokens: int) -> int:
    """Return the largest number of tokens that has the same tile."""
    few = 16 if num_tokens <= 1024 else 256
    return ceil_div(num_tokens, few) * few


def token_counts(max_tokens: int, products: set[tuple[int, int, bool]]) -> list[int]:
    """Return numbers of tokens that together have all tiles in use up to `max_tokens`.

    products: as `hopper_int8_tile` takes them. Each may have kernels of its own for the same tile:
    with a bias, or with outputs that 16 does not divide; and an LM head gets fewer tokens.
    """
    counts, seen = [], set[tuple[HopperInt8Tile, tuple[int, int, bool]]]()
    for num_tokens in sorted({rounded(n) for n in range(1, max_tokens + 1, 16)}):
        tiles = {
            (hopper_int8_tile(num_tokens, *product)._replace(num_parts=1), product)
            for product in products
        }
        if not tiles <= seen:
            seen |= tiles
            counts.append(min(num_tokens, max_tokens))
    return counts


@functools.cache
def _hopper_int8_tile(num_tokens: int, size: int, in_size: int, is_gated: bool) -> HopperInt8Tile:
    """Return the table's tile, or else the one whose busiest multiprocessor has the least to do."""

    def num_programs(tile: HopperInt8Tile) -> int:
        return math.prod(tile.grid(num_tokens, size, is_gated)) * tile.num_parts

    def is_filled(tile: HopperInt8Tile) -> bool:
        return tile.rows < 2 * num_tokens

    def is_worth_it(tile: HopperInt8Tile) -> bool:
        # With fewer inputs, adding the sums of parts costs more: they go through memory.
        if tile.num_parts > 1 and in_size < 32 * tile.rows * tile.num_parts:
            return False
        # Only programs without parts and turns go on with the next tile.
        return tile.num_parts == tile.turns == 1 or num_programs(tile) <= NUM_SMS

    def work(tile: HopperInt8Tile) -> tuple[float, int, int]:
        # Converting to bf16 takes as long as multiplying 64 rows, or 88 if a step has 64 inputs.
        area = tile.side_by_side * max(tile.rows, 64 if tile.depth > 64 else 88)
        rounds = ceil_div(num_programs(tile), NUM_SMS)
        # Of equal ones, take fewer parts to add, then fewer programs that read rows.
        return rounds * area / tile.num_parts, tile.num_parts, num_programs(tile)

    for tile, least_inputs, most_programs in FEW_OUTPUTS if in_size <= MOST_INPUTS else ():
        if is_filled(tile) and in_size >= least_inputs and num_programs(tile) <= most_programs:
            return tile
    filled = filter(is_filled, H200_INT8)
    tiles = [tile._replace(num_parts=parts) for tile in filled for parts in (1, 2, 3, 4)]
    return min(filter(is_worth_it, tiles), key=work)
