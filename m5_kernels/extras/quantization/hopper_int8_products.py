"""The work of a warpgroup of `hopper_int8`: 64 outputs of some rows, for each tile of its program.

    wait for the copies  |  bytes -> bf16  |  tensor cores  |  free the stage        for each step
    add the sums of other turns and parts  |  scale, bias, SiLU * mul  |  store      for each tile

All sums are added in a fixed order, so no result depends on which warpgroup is done first.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from m5_kernels.extras.devices.hopper_boxes import NARROW, SWIZZLED, all_threads
from m5_kernels.kernels.silu_mul import gated

from .int8_weight import WORDS_TO_BF16

OUTPUTS = gl.constexpr(64)
"""Outputs of a warpgroup."""
GROUP = gl.constexpr(64)
"""Inputs of 16 words, see `int8_weight`."""
BAND = gl.constexpr(8)
"""Tiles of rows that run next to each other, so that they find words and rows in the L2 cache."""
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
SUMS_OF_TURNS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))


@gluon.jit
def corner(tile, tiles, ROWS: gl.constexpr, SIDES: gl.constexpr, PIECES: gl.constexpr):
    """Return the first row of a tile, and its first output."""
    num_down, num_across, _size = tiles
    band, place = tile // (BAND * num_across), tile % (BAND * num_across)
    height = gl.minimum(num_down - band * BAND, BAND)
    row = (band * BAND + place % height) * ROWS
    return row, place // height * (SIDES * OUTPUTS // PIECES)


@gluon.jit
def multiply(
    warpgroup: gl.constexpr, tiles, steps, ring, weights, adding, store, work: gl.constexpr
):
    """Multiply what the copies bring, in all steps of this warpgroup's turn."""
    w, x, more_x, full, empty = ring
    MORE_ROWS: gl.constexpr = work[0]
    SIDES: gl.constexpr = work[1]
    TURNS: gl.constexpr = work[2]
    STAGES: gl.constexpr = work[3]
    PIECES: gl.constexpr = 1 + work[4]
    ROWS: gl.constexpr = x.shape[1]
    GROUPS: gl.constexpr = x.shape[2] // GROUP
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(MORE_ROWS, 8), 16])
    # In memory, the groups of a stage follow each other.
    w = w._reinterpret(gl.int32, [STAGES * SIDES * GROUPS, OUTPUTS, GROUP // 4], WORDS)
    x = x._reinterpret(gl.bfloat16, [STAGES * GROUPS, ROWS, GROUP], SWIZZLED)
    if MORE_ROWS:
        more_x = more_x._reinterpret(gl.bfloat16, [STAGES * GROUPS, MORE_ROWS, GROUP], SWIZZLED)
    side: gl.constexpr = warpgroup % SIDES
    turn: gl.constexpr = warpgroup // SIDES
    first, last = steps
    number = turn  # counts the steps of all tiles
    for tile in range(gl.program_id(0), tiles[0] * tiles[1], gl.num_programs(0)):
        row, column = corner(tile, tiles, ROWS + MORE_ROWS, SIDES, PIECES)
        column += side * (OUTPUTS // PIECES)
        factors, offsets = _scale_and_bias(weights, column, tiles, SUMS, PIECES)
        sums = gl.zeros([OUTPUTS, ROWS], gl.float32, SUMS)
        more = gl.zeros([OUTPUTS, max(MORE_ROWS, 8)], gl.float32, MORE)
        for _ in range(first + turn, last, TURNS):
            stage = number % STAGES
            mbarrier.wait(full.index(stage), number // STAGES & 1)
            used: gl.tuple = ()
            for group in gl.static_range(GROUPS):
                words = w.index((stage * SIDES + side) * GROUPS + group)
                integers = _integers(words.load(gl.DotOperandLayout(0, SUMS, 2)))
                for i in gl.static_range(4):
                    rows = x.index(stage * GROUPS + group).slice(16 * i, 16, dim=1)
                    sums = warpgroup_mma(integers[i], rows.permute((1, 0)), sums, is_async=True)
                    if MORE_ROWS:
                        rows = more_x.index(stage * GROUPS + group).slice(16 * i, 16, dim=1)
                        same = gl.convert_layout(integers[i], gl.DotOperandLayout(0, MORE, 2), True)
                        more = warpgroup_mma(same, rows.permute((1, 0)), more, is_async=True)
                used += integers
            used += (sums, more)  # registers that are in use until the wait
            used = warpgroup_mma_wait(0, deps=used)
            sums, more = used[4 * GROUPS], used[4 * GROUPS + 1]
            mbarrier.arrive(empty.index(stage), count=1)
            number += TURNS
        sums_of_turns, turns_done, sums_of_parts, arrivals = adding
        if turn > 0:
            sums_of_turns.index(turn - 1).store(sums)
            all_threads()
            mbarrier.arrive(turns_done, count=1)
        else:
            if TURNS > 1:
                mbarrier.wait(turns_done, 0)
                for other in gl.static_range(TURNS - 1):
                    sums += sums_of_turns.index(other).load(SUMS)
            part, num_parts = gl.program_id(1), gl.num_programs(1)
            is_last = True
            if num_parts > 1:
                mine = tile * SIDES + side
                places = sums_of_parts + mine * num_parts * (OUTPUTS * (ROWS + MORE_ROWS))
                more_places = places + num_parts * (OUTPUTS * ROWS)
                _store_part(places, part, sums)
                if MORE_ROWS:
                    _store_part(more_places, part, more)
                all_threads()
                num_before = gl.atomic_add(arrivals + mine, 1, sem="acq_rel", scope="gpu")
                is_last = num_before == num_parts - 1
                if is_last:
                    gl.store(arrivals + mine, 0)
                    sums = _add_parts(places, num_parts, sums)
                    if MORE_ROWS:
                        more = _add_parts(more_places, num_parts, more)
            if is_last:
                output_boxes, more_output_boxes, result = store
                result = result.index(side)
                _store(output_boxes, row, column, result, sums, factors, offsets, PIECES)
                if MORE_ROWS:
                    same_place = result._reinterpret(gl.bfloat16, [MORE_ROWS, OUTPUTS], SWIZZLED)
                    row += ROWS
                    _store(
                        more_output_boxes, row, column, same_place, more, factors, offsets, PIECES
                    )


@gluon.jit
def _integers(words):
    """Return the four bytes of each word in bf16, as the tensor cores need them."""
    return gl.inline_asm_elementwise(
        WORDS_TO_BF16,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _scale_and_bias(weights, column, tiles, SUMS: gl.constexpr, PIECES: gl.constexpr):
    """Return scale and bias of 64 outputs. With a gate, half are up's, `size` rows later."""
    scale, bias = weights
    output = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, SUMS))
    piece: gl.constexpr = OUTPUTS // PIECES
    columns = gl.minimum(column + output % piece, tiles[2] - 1) + output // piece * tiles[2]
    factors = gl.load(scale + columns)
    if bias is None:
        return factors, gl.zeros_like(factors)
    else:
        return factors, gl.load(bias + columns).to(gl.float32)


@gluon.jit
def _places(of_parts, part, sums):
    outputs = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, sums.type.layout))[:, None]
    rows = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))[None, :]
    return of_parts + (part * OUTPUTS + outputs) * sums.shape[1] + rows


@gluon.jit
def _store_part(of_parts, part, sums):
    gl.store(_places(of_parts, part, sums), sums)


@gluon.jit
def _add_parts(of_parts, num_parts, sums):
    total = gl.zeros_like(sums)
    for part in range(num_parts):
        total += gl.load(_places(of_parts, part, sums), cache_modifier=".cg")
    return total


@gluon.jit
def _store(output_boxes, row, column, result, sums, factors, offsets, PIECES: gl.constexpr):
    OUTPUT: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    factors = gl.convert_layout(factors, OUTPUT, True)
    offsets = gl.convert_layout(offsets, OUTPUT, True)
    outputs = sums * factors[:, None] + offsets[:, None]
    result.permute((1, 0)).store(outputs.to(gl.bfloat16))
    if PIECES == 2:
        half: gl.constexpr = OUTPUTS // 2
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
        all_threads()
        gate = result.slice(0, half, dim=1).load(LAYOUT)
        up = result.slice(half, half, dim=1).load(LAYOUT)
        all_threads()
        result = result._reinterpret(gl.bfloat16, [sums.shape[1], half], NARROW)
        result.store(gated(gate, up))
    fence_async_shared()
    all_threads()
    tma.async_copy_shared_to_global(output_boxes, [row, column], result)
    tma.store_wait(0)
    all_threads()
