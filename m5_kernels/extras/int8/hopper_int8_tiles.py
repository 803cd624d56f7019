"""How programs of `hopper_int8` cover a product: what they can have, and which is the fastest.

    side by side, 3 x 1         in turn, 1 x 4
    |  64 |  64 |  64 |         |  64 |        outputs of a warpgroup
    +-----+-----+-----+         +-----+
    |  A  |  B  |  C  | rows    | A+B | rows
    |     |     |     |         | C+D |
    steps 0 1 2 ...             A: 0 4 ..  B: 1 5 ..  C: 2 6 ..  D: 3 7 ..

Making bf16 of bytes is a long chain of short instructions, in which a warpgroup spends more time
than the tensor cores need. So there are three or four of them, or two where the sums of many rows
leave no registers. Side by side they share the rows; that is for weights with many outputs. Else
they take steps in turn: then a program has only 64 outputs, and there are enough programs for all
multiprocessors.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from m5_kernels.extras.hopper.tiles import NUM_SMS
from m5_kernels.kernels.backend import ceil_div

COPY_REGISTERS = 32
"""Of a thread that does nothing but start copies."""


class HopperInt8Tile(NamedTuple):
    """What a program multiplies, and with what."""

    rows: int  # tokens: a power of two, or a half or a quarter more than one
    side_by_side: int  # warpgroups, each of 64 other outputs
    turns: int  # warpgroups of the same outputs
    depth: int  # inputs of a step
    num_stages: int  # steps on their way, as many for each turn
    num_parts: int = 1  # of the inputs: programs of the same outputs

    @property
    def wide(self) -> int:
        """Rows that are multiplied together; those beyond a power of two are, too."""
        return 1 << self.rows.bit_length() - 1

    @property
    def registers(self) -> tuple[int, int]:
        """Of a thread when a program starts, and of one that multiplies afterwards.

        No more than needed, so that a program of another kernel finds room beside this one.
        """
        needed = self.rows // 2 + self.depth // 4 + 48  # sums, integers, addresses
        warps = 4 * self.side_by_side * self.turns
        mean = ceil_div(needed * warps + 4 * COPY_REGISTERS, warps + 4)
        mean = ceil_div(max(mean, self.wide // 2 + 30), 8) * 8  # 30: of a matrix instruction
        return mean, min(((warps + 4) * mean - 4 * COPY_REGISTERS) // warps // 8 * 8, 232)

    def grid(self, num_tokens: int, size: int, is_gated: bool) -> tuple[int, int]:
        """Tiles below each other, and beside. size: outputs, with a gate half of them."""
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
"""Those that were the fastest somewhere, with Qwen3's shapes on an H200."""

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
"""Who takes turns where outputs are few, and each program has a multiprocessor to itself: the first
that fits.

It was made for QKV, output and down of Qwen3-8B's and Qwen3-0.6B's shapes, and the smaller one's
gate and up, from tiles that were tried on an H200 with 16 to 256 rows
(docs/reference/m5_attempts.md). Steps with what was chosen are in
docs/measurements/m5_eight_bits_steps.md. Other shapes were not tried.
"""
MOST_INPUTS = 12288
"""Of these shapes. With more, it pays to cut them into more parts than the table has."""


def hopper_int8_tile(
    num_tokens: int, size: int, in_size: int, is_gated: bool = False
) -> HopperInt8Tile:
    """The tile that is expected to be the fastest. size: as in `grid`.

    Inputs are cut into parts where that gives more multiprocessors something to do.
    """
    return _hopper_int8_tile(rounded(num_tokens), size, in_size, is_gated)


def rounded(num_tokens: int) -> int:
    """The largest number of tokens with the same tile."""
    few = 16 if num_tokens <= 1024 else 256
    return ceil_div(num_tokens, few) * few


def token_counts(max_tokens: int, products: set[tuple[int, int, bool]]) -> list[int]:
    """Numbers of tokens that between them have all tiles which up to `max_tokens` have.

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
    """As the table says; else the one with which the busiest multiprocessor has the least to do."""

    def num_programs(tile: HopperInt8Tile) -> int:
        return math.prod(tile.grid(num_tokens, size, is_gated)) * tile.num_parts

    def is_filled(tile: HopperInt8Tile) -> bool:
        return tile.rows < 2 * num_tokens

    def is_worth_it(tile: HopperInt8Tile) -> bool:
        # With fewer inputs it takes longer to add the sums of parts, which go through memory.
        if tile.num_parts > 1 and in_size < 32 * tile.rows * tile.num_parts:
            return False
        # Only programs without parts and turns go on with the next tile.
        return tile.num_parts == tile.turns == 1 or num_programs(tile) <= NUM_SMS

    def work(tile: HopperInt8Tile) -> tuple[float, int, int]:
        # Making bf16 takes as long as multiplying 64 rows, or 88 where a step has 64 inputs.
        area = tile.side_by_side * max(tile.rows, 64 if tile.depth > 64 else 88)
        rounds = ceil_div(num_programs(tile), NUM_SMS)
        # If several have as much to do: fewer parts to add, then fewer programs that read rows.
        return rounds * area / tile.num_parts, tile.num_parts, num_programs(tile)

    for tile, least_inputs, most_programs in FEW_OUTPUTS if in_size <= MOST_INPUTS else ():
        if is_filled(tile) and in_size >= least_inputs and num_programs(tile) <= most_programs:
            return tile
    filled = filter(is_filled, H200_INT8)
    tiles = [tile._replace(num_parts=parts) for tile in filled for parts in (1, 2, 3, 4)]
    return min(filter(is_worth_it, tiles), key=work)
