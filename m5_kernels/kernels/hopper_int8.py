"""Products of many rows with weights in eight bits, on Hopper.

What `int8_linear` does, written in Gluon, for what Triton does not say: which warps do what, and
that integers are made in the registers of which tensor cores take them.

    copying warp    words and rows of steps k+2, k+3, ... into a ring in shared memory
    four warps      integers(k), products(k)               |  integers(k+1), products(k+1)
    four others                integers(k), products(k)               |  integers(k+1), ...

A warpgroup, four warps, makes 64 outputs, and waits for nobody but the copies: while one makes
integers, the tensor cores multiply for another. Making them is a long chain of short instructions,
so a program has two to four warpgroups (`HopperInt8Tile`):

    side by side    each for 64 other outputs, with the same rows
    in turn         all for the same outputs: each multiplies every third step, or fourth, and
                    their sums are added at the end

Where outputs are too few for all multiprocessors, programs share a tile: each adds up a part of the
inputs, and the last one that is done adds the parts. Whatever is added, is added in its order, so
no result depends on who was first.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .backend import ceil_div, launch_options, wait_for_previous
from .int8_weight import WORDS_TO_BF16, Int8Weight
from .silu_mul import gated
from .tiles import COPY_REGISTERS, NUM_SMS, HopperInt8Tile, hopper_int8_tile

OUTPUTS = gl.constexpr(64)
"""Of a warpgroup."""
GROUP = gl.constexpr(64)
"""Inputs of 16 words, see `int8_weight`."""
BAND = gl.constexpr(8)
"""Tiles of rows that run side by side, so that they find words and rows in the L2 cache."""
INPUTS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
HALF_INPUTS = gl.constexpr(gl.NVMMASharedLayout(64, element_bitwidth=16, rank=2))
"""Of 32 columns."""
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
SUMS_OF_TURNS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
all_threads = getattr(gl, "thread_barrier", None) or gl.barrier  # its name before and since 3.7


def hopper_int8(
    hidden: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: HopperInt8Tile | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """As `int8_linear`, in bf16. Rows of `hidden`, and outputs, begin at multiples of 16 bytes.

    is_gated: as in `linear`.
    """
    num_tokens, in_size = hidden.shape
    size = len(weight) // (1 + is_gated)
    tile = tile or hopper_int8_tile(num_tokens, size, in_size, is_gated)
    output = hidden.new_empty(num_tokens, size)
    num_down, num_across = tile.grid(num_tokens, size, is_gated)
    num_shared = num_down * num_across if tile.num_parts > 1 else 0
    assert num_shared * tile.side_by_side <= len(weight.arrivals)
    piece = OUTPUTS.value // (1 + is_gated)
    layout = (HALF_INPUTS if is_gated else INPUTS).value
    wide, narrow = tile.wide, tile.rows - tile.wide or tile.wide
    registers, of_a_thread = tile.registers
    workers = tile.side_by_side * tile.turns - 1
    # Programs go on with the next tile, if nothing has to be added up in between.
    most = num_down * num_across if tile.num_parts > 1 else NUM_SMS * tile.programs_per_sm
    _hopper_int8_kernel[(min(num_down * num_across, most), tile.num_parts)](
        boxes(hidden, [wide, tile.depth], INPUTS.value),
        boxes(hidden, [narrow, tile.depth], INPUTS.value),
        boxes(weight.words, [piece, GROUP.value // 4], WORDS.value),
        boxes(output, [wide, piece], layout),
        boxes(output, [narrow, piece], layout),
        weight.scale, bias,
        hidden.new_empty(
            num_shared, tile.num_parts, tile.side_by_side * OUTPUTS.value, tile.rows,
            dtype=torch.float32,
        ),
        weight.arrivals, size, num_down, num_across, ceil_div(in_size, tile.depth),
        WIDE=wide,
        NARROW=tile.rows - wide,
        SIDES=tile.side_by_side,
        TURNS=tile.turns,
        DEPTH=tile.depth,
        STAGES=tile.num_stages,
        HAS_BIAS=bias is not None,
        IS_GATED=is_gated,
        PDL=pdl,
        WORKER_WARPS=(4,) * workers + (1,),
        WORKER_REGISTERS=(of_a_thread,) * workers + (COPY_REGISTERS,),
        num_warps=4,
        maxnreg=registers,
        **launch_options(pdl),
    )  # fmt: skip
    return output


def boxes(matrix: torch.Tensor, box: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """How the copy engine takes boxes from a matrix, or brings them. Outside of it are zeros."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)


@gluon.jit(do_not_specialize=["num_down", "num_across", "num_steps"])
def _hopper_int8_kernel(
    wide_boxes, narrow_boxes, word_boxes, wide_outputs, narrow_outputs,
    scale, bias, parts, arrivals, size, num_down, num_across, num_steps,
    WIDE: gl.constexpr,
    NARROW: gl.constexpr,
    SIDES: gl.constexpr,
    TURNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    IS_GATED: gl.constexpr,
    PDL: gl.constexpr,
    WORKER_WARPS: gl.constexpr,
    WORKER_REGISTERS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    PIECES: gl.constexpr = 1 + IS_GATED  # of a warpgroup's outputs: half gates, half ups
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, WIDE, DEPTH], INPUTS)
    more_x = x
    if NARROW:
        more_x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, NARROW, DEPTH], INPUTS)
    num_boxes: gl.constexpr = STAGES * SIDES * (DEPTH // GROUP) * PIECES
    w = gl.allocate_shared_memory(gl.int32, [num_boxes, OUTPUTS // PIECES, GROUP // 4], WORDS)
    result = gl.allocate_shared_memory(gl.bfloat16, [SIDES, WIDE, OUTPUTS], INPUTS)
    turns = result
    if TURNS > 1:
        num_sums: gl.constexpr = (TURNS - 1) * SIDES
        turns = gl.allocate_shared_memory(gl.float32, [num_sums, OUTPUTS, WIDE], SUMS_OF_TURNS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [SIDES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=SIDES)
    for side in gl.static_range(SIDES):
        mbarrier.init(done.index(side), count=max(TURNS - 1, 1))
    fence_async_shared()
    ring = (x, more_x, w, full, empty)
    part, num_parts = gl.program_id(1), gl.num_programs(1)
    steps = (part * num_steps // num_parts, (part + 1) * num_steps // num_parts)
    tiles = (num_down, num_across, size)
    store = (wide_outputs, narrow_outputs, scale, bias, result, turns, done, parts, arrivals)
    shape: gl.constexpr = (NARROW, SIDES, TURNS, STAGES, HAS_BIAS, IS_GATED, PDL)
    gl.warp_specialize([
        (_multiply, (3, ring, tiles, steps, store, shape)),
        (_multiply, (2, ring, tiles, steps, store, shape)),
        (_multiply, (1, ring, tiles, steps, store, shape)),
        (_multiply, (0, ring, tiles, steps, store, shape)),
        (_copy, (word_boxes, wide_boxes, narrow_boxes, ring, tiles, steps, shape)),
    ][4 - SIDES * TURNS :], WORKER_WARPS, WORKER_REGISTERS)  # fmt: skip


@gluon.jit
def _corner(tile, num_down, num_across, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """The first row of a tile, and its first output."""
    band, place = tile // (BAND * num_across), tile % (BAND * num_across)
    height = gl.minimum(num_down - band * BAND, BAND)
    return (band * BAND + place % height) * ROWS, place // height * COLUMNS


@gluon.jit
def _copy(word_boxes, wide_boxes, narrow_boxes, ring, tiles, steps, shape: gl.constexpr):
    """Let the copy engine fill the ring, a stage as soon as its warpgroups are done with it."""
    NARROW: gl.constexpr = shape[0]
    SIDES: gl.constexpr = shape[1]
    STAGES: gl.constexpr = shape[3]
    PIECES: gl.constexpr = 1 + shape[5]
    PDL: gl.constexpr = shape[6]
    x, more_x, w, full, empty = ring
    num_down, num_across, size = tiles
    first, last = steps
    WIDE: gl.constexpr = x.shape[1]
    DEPTH: gl.constexpr = x.shape[2]
    COLUMNS: gl.constexpr = SIDES * OUTPUTS // PIECES
    num_bytes: gl.constexpr = (2 * (WIDE + NARROW) + SIDES * OUTPUTS) * DEPTH
    num_early = 0
    if PDL:
        num_early = gl.minimum(STAGES, last - first)
        _, column = _corner(gl.program_id(0), num_down, num_across, WIDE + NARROW, COLUMNS)
        for stage in range(num_early):
            mbarrier.expect(full.index(stage), num_bytes)
            _copy_words(
                word_boxes, w, full, column, size, stage, first + stage, DEPTH, SIDES, PIECES
            )
        wait_for_previous()
    number = 0  # of the step, of all of the program's
    for tile in range(gl.program_id(0), num_down * num_across, gl.num_programs(0)):
        row, column = _corner(tile, num_down, num_across, WIDE + NARROW, COLUMNS)
        for step in range(first, last):
            stage = number % STAGES
            barrier, place = full.index(stage), step * DEPTH
            mbarrier.wait(empty.index(stage), (number // STAGES & 1) ^ 1)
            if number >= num_early:
                mbarrier.expect(barrier, num_bytes)
                _copy_words(word_boxes, w, full, column, size, stage, step, DEPTH, SIDES, PIECES)
            tma.async_copy_global_to_shared(wide_boxes, [row, place], barrier, x.index(stage))
            if NARROW:
                tma.async_copy_global_to_shared(
                    narrow_boxes, [row + WIDE, place], barrier, more_x.index(stage)
                )
            number += 1


@gluon.jit
def _copy_words(
    word_boxes, w, full, column, size, stage, step,
    DEPTH: gl.constexpr,
    SIDES: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """The words of a step, a box for each group of inputs; ups are `size` rows below gates."""
    GROUPS: gl.constexpr = DEPTH // GROUP
    for side in gl.static_range(SIDES):
        for group in gl.static_range(GROUPS):
            for piece in gl.static_range(PIECES):
                row = column + side * (OUTPUTS // PIECES) + piece * size
                word = (step * GROUPS + group) * (GROUP // 4)
                box = ((stage * SIDES + side) * GROUPS + group) * PIECES + piece
                tma.async_copy_global_to_shared(
                    word_boxes, [row, word], full.index(stage), w.index(box)
                )


@gluon.jit
def _multiply(warpgroup: gl.constexpr, ring, tiles, steps, store, shape: gl.constexpr):
    NARROW: gl.constexpr = shape[0]
    SIDES: gl.constexpr = shape[1]
    TURNS: gl.constexpr = shape[2]
    STAGES: gl.constexpr = shape[3]
    HAS_BIAS: gl.constexpr = shape[4]
    IS_GATED: gl.constexpr = shape[5]
    x, more_x, w, full, empty = ring
    num_down, num_across, size = tiles
    first, last = steps
    wide_outputs, narrow_outputs, scale, bias, result, turns, done, parts, arrivals = store
    part, num_parts = gl.program_id(1), gl.num_programs(1)
    side: gl.constexpr = warpgroup % SIDES
    turn: gl.constexpr = warpgroup // SIDES
    WIDE: gl.constexpr = x.shape[1]
    ROWS: gl.constexpr = WIDE + NARROW
    GROUPS: gl.constexpr = x.shape[2] // GROUP
    COLUMNS: gl.constexpr = OUTPUTS // (1 + IS_GATED)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDE, 16])
    MORE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, max(NARROW, 8), 16])
    # In memory, groups of a stage lie behind each other.
    x = x._reinterpret(gl.bfloat16, [STAGES * GROUPS, WIDE, GROUP], INPUTS)
    if NARROW:
        more_x = more_x._reinterpret(gl.bfloat16, [STAGES * GROUPS, NARROW, GROUP], INPUTS)
    w = w._reinterpret(gl.int32, [STAGES * SIDES * GROUPS, OUTPUTS, GROUP // 4], WORDS)
    result = result.index(side)
    number = turn
    for tile in range(gl.program_id(0), num_down * num_across, gl.num_programs(0)):
        row, column = _corner(tile, num_down, num_across, ROWS, SIDES * COLUMNS)
        column += side * COLUMNS
        factors, offsets = _scale_and_bias(scale, bias, column, size, SUMS, HAS_BIAS, IS_GATED)
        sums = gl.zeros([OUTPUTS, WIDE], gl.float32, SUMS)
        more = gl.zeros([OUTPUTS, max(NARROW, 8)], gl.float32, MORE)
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
                    if NARROW:
                        rows = more_x.index(stage * GROUPS + group).slice(16 * i, 16, dim=1)
                        same = gl.convert_layout(integers[i], gl.DotOperandLayout(0, MORE, 2), True)
                        more = warpgroup_mma(same, rows.permute((1, 0)), more, is_async=True)
                used += integers
            used += (sums, more)  # registers in which something is going on until the wait
            used = warpgroup_mma_wait(0, deps=used)
            sums, more = used[4 * GROUPS], used[4 * GROUPS + 1]
            mbarrier.arrive(empty.index(stage), count=1)
            number += TURNS
        if turn > 0:
            turns.index((turn - 1) * SIDES + side).store(sums)
            all_threads()
            mbarrier.arrive(done.index(side), count=1)
        else:
            if TURNS > 1:
                mbarrier.wait(done.index(side), 0)
                for other in gl.static_range(TURNS - 1):
                    sums += turns.index(other * SIDES + side).load(SUMS)
            is_last = True
            if num_parts > 1:
                arrived = arrivals + tile * SIDES + side
                sums_of_parts = parts + (tile * SIDES + side) * num_parts * (OUTPUTS * ROWS)
                _store_part(sums_of_parts, part, sums, 0, ROWS)
                if NARROW:
                    _store_part(sums_of_parts, part, more, WIDE, ROWS)
                all_threads()
                before = gl.atomic_add(arrived, 1, sem="acq_rel", scope="gpu")
                is_last = before == num_parts - 1
                if is_last:
                    gl.store(arrived, 0)
                    sums = _add_parts(sums_of_parts, num_parts, sums, 0, ROWS)
                    if NARROW:
                        more = _add_parts(sums_of_parts, num_parts, more, WIDE, ROWS)
            if is_last:
                _store(wide_outputs, row, column, result, sums, factors, offsets, IS_GATED)
                if NARROW:
                    again = result._reinterpret(gl.bfloat16, [NARROW, OUTPUTS], INPUTS)
                    _store(
                        narrow_outputs, row + WIDE, column, again, more, factors, offsets, IS_GATED
                    )


@gluon.jit
def _integers(words):
    """The four bytes of each word, as the tensor cores take them."""
    return gl.inline_asm_elementwise(
        WORDS_TO_BF16,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )


@gluon.jit
def _scale_and_bias(
    scale, bias, column, size, SUMS: gl.constexpr, HAS_BIAS: gl.constexpr, IS_GATED: gl.constexpr
):
    output = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, SUMS))
    if IS_GATED:
        half: gl.constexpr = OUTPUTS // 2
        columns = gl.minimum(column + output % half, size - 1) + output // half * size
    else:
        columns = gl.minimum(column + output, size - 1)
    factors = gl.load(scale + columns)
    offsets = factors
    if HAS_BIAS:
        offsets = gl.load(bias + columns).to(gl.float32)
    else:
        offsets = gl.zeros_like(factors)
    return factors, offsets


@gluon.jit
def _places(sums_of_parts, part, sums, first: gl.constexpr, ROWS: gl.constexpr):
    outputs = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, sums.type.layout))[:, None]
    rows = gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, sums.type.layout))[None, :]
    return sums_of_parts + (part * OUTPUTS + outputs) * ROWS + first + rows


@gluon.jit
def _store_part(sums_of_parts, part, sums, first: gl.constexpr, ROWS: gl.constexpr):
    gl.store(_places(sums_of_parts, part, sums, first, ROWS), sums)


@gluon.jit
def _add_parts(sums_of_parts, num_parts, sums, first: gl.constexpr, ROWS: gl.constexpr):
    total = gl.zeros_like(sums)
    for part in range(num_parts):
        places = _places(sums_of_parts, part, sums, first, ROWS)
        total += gl.load(places, cache_modifier=".cg")
    return total


@gluon.jit
def _store(output_boxes, row, column, result, sums, factors, offsets, IS_GATED: gl.constexpr):
    OUTPUT: gl.constexpr = gl.SliceLayout(1, sums.type.layout)
    factors = gl.convert_layout(factors, OUTPUT, True)
    offsets = gl.convert_layout(offsets, OUTPUT, True)
    sums = sums * factors[:, None] + offsets[:, None]
    result.permute((1, 0)).store(sums.to(gl.bfloat16))
    if IS_GATED:
        ROWS: gl.constexpr = sums.shape[1]
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
        half: gl.constexpr = OUTPUTS // 2
        all_threads()
        gate = result.slice(0, half, dim=1).load(LAYOUT)
        up = result.slice(half, half, dim=1).load(LAYOUT)
        all_threads()
        result = result._reinterpret(gl.bfloat16, [ROWS, half], HALF_INPUTS)
        result.store(gated(gate, up).to(gl.bfloat16))
    fence_async_shared()
    all_threads()
    tma.async_copy_shared_to_global(output_boxes, [row, column], result)
    tma.store_wait(0)
    all_threads()
