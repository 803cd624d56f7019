"""Linear layers of many rows with weights in 8 bits, on Hopper.

It computes what `int8_linear` does. It is written in Gluon, which can say what Triton cannot: which
warps do what, and that integers are made in the registers from which tensor cores read them.

    copying warp    words and rows of steps k+2, k+3, ... into a ring in shared memory
    four warps      integers(k), products(k)               |  integers(k+1), products(k+1)
    four others                integers(k), products(k)               |  integers(k+1), ...

A warpgroup is four warps, and only waits for the copies: while one makes integers, the tensor cores
multiply for another (`hopper_int8_products`). The tile says how many warpgroups there are, and what
each of them computes (`hopper_int8_tiles`). A program goes on with another tile, so that copies
never stop.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from m5_kernels.extras.devices.few_rows_tiles import NUM_SMS
from m5_kernels.extras.devices.hopper_boxes import NARROW, SWIZZLED, boxes
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import LATE, wait_for_previous
from m5_kernels.kernels.triton_or_twin import ceil_div

from .hopper_int8_products import GROUP, OUTPUTS, SUMS_OF_TURNS, WORDS, corner, multiply
from .hopper_int8_tiles import COPY_REGISTERS, HopperInt8Tile, hopper_int8_tile
from .int8_weight import Int8Weight


def hopper_int8(
    hidden: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: HopperInt8Tile | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias` in bf16, or silu(gate) * up of it.

    All rows, of the output too, must begin at multiples of 16 bytes.
    """
    num_tokens, in_size = hidden.shape
    size = len(weight) // (1 + is_gated)
    tile = tile or hopper_int8_tile(num_tokens, size, in_size, is_gated)
    output = hidden.new_empty(num_tokens, size)
    num_down, num_across = tile.grid(num_tokens, size, is_gated)
    num_programs = num_tiles = num_down * num_across
    if tile.num_parts == tile.turns == 1:
        num_programs = min(num_tiles, NUM_SMS)
    num_shared = num_tiles if tile.num_parts > 1 else 0
    assert num_shared * tile.side_by_side <= len(weight.arrivals)
    sums_shape = (num_shared, tile.num_parts, tile.side_by_side, OUTPUTS.value, tile.rows)
    columns, layout = OUTPUTS.value // (1 + is_gated), (NARROW if is_gated else SWIZZLED).value
    more_rows = tile.rows - tile.wide
    registers, of_others = tile.registers
    num_others = tile.side_by_side * tile.turns - 1
    launch.kernel(_hopper_int8_kernel, (num_programs, tile.num_parts))(
        boxes(weight.words, [columns, GROUP.value // 4], WORDS.value),
        boxes(hidden, [tile.wide, tile.depth], SWIZZLED.value),
        boxes(hidden, [more_rows or tile.wide, tile.depth], SWIZZLED.value),
        boxes(output, [tile.wide, columns], layout),
        boxes(output, [more_rows or tile.wide, columns], layout),
        weight.scale, bias,
        hidden.new_empty(sums_shape, dtype=torch.float32), weight.arrivals,
        size, num_down, num_across, ceil_div(in_size, tile.depth),
        ROWS=tile.wide,
        MORE_ROWS=more_rows,
        SIDES=tile.side_by_side,
        TURNS=tile.turns,
        DEPTH=tile.depth,
        STAGES=tile.num_stages,
        IS_GATED=is_gated,
        OTHER_WARPS=(4,) * num_others + (1,),
        OTHER_REGISTERS=(of_others,) * num_others + (COPY_REGISTERS,),
        num_warps=4,
        maxnreg=registers,
        **launch.pdl_options(most=LATE),
    )  # fmt: skip
    return output


@gluon.jit(do_not_specialize=["num_down", "num_across", "num_steps"])
def _hopper_int8_kernel(
    word_boxes, row_boxes, more_row_boxes, output_boxes, more_output_boxes,
    scale, bias, sums_of_parts, arrivals, size, num_down, num_across, num_steps,
    ROWS: gl.constexpr,
    MORE_ROWS: gl.constexpr,
    SIDES: gl.constexpr,
    TURNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    IS_GATED: gl.constexpr,
    PDL: gl.constexpr,
    OTHER_WARPS: gl.constexpr,
    OTHER_REGISTERS: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = 1 + IS_GATED  # a warpgroup's outputs: with a gate, half gate, half up
    num_boxes: gl.constexpr = STAGES * SIDES * (DEPTH // GROUP) * PIECES
    w = gl.allocate_shared_memory(gl.int32, [num_boxes, OUTPUTS // PIECES, GROUP // 4], WORDS)
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DEPTH], SWIZZLED)
    more_x = x
    if MORE_ROWS:
        more_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, MORE_ROWS, DEPTH], SWIZZLED)
    result = gl.allocate_shared_memory(gl.bfloat16, [SIDES, ROWS, OUTPUTS], SWIZZLED)
    sums_of_turns = result
    if TURNS > 1:
        others: gl.constexpr = TURNS - 1
        shape: gl.constexpr = [others, OUTPUTS, ROWS]
        sums_of_turns = gl.allocate_shared_memory(gl.float32, shape, SUMS_OF_TURNS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns_done = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=SIDES)
    mbarrier.init(turns_done, count=max(TURNS - 1, 1))
    fence_async_shared()
    part, num_parts = gl.program_id(1), gl.num_programs(1)
    steps = (part * num_steps // num_parts, (part + 1) * num_steps // num_parts)
    tiles = (num_down, num_across, size)
    ring = (w, x, more_x, full, empty)
    weights = (scale, bias)
    adding = (sums_of_turns, turns_done, sums_of_parts, arrivals)
    store = (output_boxes, more_output_boxes, result)
    work: gl.constexpr = (MORE_ROWS, SIDES, TURNS, STAGES, IS_GATED, PDL)
    gl.warp_specialize([
        (multiply, (3, tiles, steps, ring, weights, adding, store, work)),
        (multiply, (2, tiles, steps, ring, weights, adding, store, work)),
        (multiply, (1, tiles, steps, ring, weights, adding, store, work)),
        (multiply, (0, tiles, steps, ring, weights, adding, store, work)),
        (_copy, (word_boxes, row_boxes, more_row_boxes, tiles, steps, ring, work)),
    ][4 - SIDES * TURNS :], OTHER_WARPS, OTHER_REGISTERS)  # fmt: skip


@gluon.jit
def _copy(word_boxes, row_boxes, more_row_boxes, tiles, steps, ring, work: gl.constexpr):
    """Let the copy engine fill the ring: each stage again as soon as its warpgroups are done."""
    w, x, more_x, full, empty = ring
    MORE_ROWS: gl.constexpr = work[0]
    SIDES: gl.constexpr = work[1]
    STAGES: gl.constexpr = work[3]
    PIECES: gl.constexpr = 1 + work[4]
    PDL: gl.constexpr = work[5]
    ROWS: gl.constexpr = x.shape[1]
    DEPTH: gl.constexpr = x.shape[2]
    num_bytes: gl.constexpr = (2 * (ROWS + MORE_ROWS) + SIDES * OUTPUTS) * DEPTH
    num_tiles = tiles[0] * tiles[1]
    first, last = steps
    num_early = 0
    if PDL:
        num_early = gl.minimum(STAGES, last - first)
        _row, column = corner(gl.program_id(0), tiles, ROWS + MORE_ROWS, SIDES, PIECES)
        for stage in range(num_early):
            mbarrier.expect(full.index(stage), num_bytes)
            _copy_words(
                word_boxes, column, tiles, first + stage, w, full, stage, DEPTH, SIDES, PIECES
            )
        wait_for_previous()
    number = 0  # counts the steps of all tiles
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        row, column = corner(tile, tiles, ROWS + MORE_ROWS, SIDES, PIECES)
        for step in range(first, last):
            stage = number % STAGES
            barrier, depth = full.index(stage), step * DEPTH
            mbarrier.wait(empty.index(stage), (number // STAGES & 1) ^ 1)
            if number >= num_early:
                mbarrier.expect(barrier, num_bytes)
                _copy_words(word_boxes, column, tiles, step, w, full, stage, DEPTH, SIDES, PIECES)
            tma.async_copy_global_to_shared(row_boxes, [row, depth], barrier, x.index(stage))
            if MORE_ROWS:
                place = [row + ROWS, depth]
                tma.async_copy_global_to_shared(more_row_boxes, place, barrier, more_x.index(stage))
            number += 1


@gluon.jit
def _copy_words(
    word_boxes, column, tiles, step, w, full, stage,
    DEPTH: gl.constexpr,
    SIDES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Copy the words of a step. The rows of up come after all rows of gate."""
    GROUPS: gl.constexpr = DEPTH // GROUP
    for side in gl.static_range(SIDES):
        for group in gl.static_range(GROUPS):
            for piece in gl.static_range(PIECES):
                row = column + side * (OUTPUTS // PIECES) + piece * tiles[2]
                place = [row, (step * GROUPS + group) * (GROUP // 4)]
                box = ((stage * SIDES + side) * GROUPS + group) * PIECES + piece
                tma.async_copy_global_to_shared(word_boxes, place, full.index(stage), w.index(box))
