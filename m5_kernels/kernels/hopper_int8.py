"""Products of many rows with weights in eight bits, on Hopper.

What `int8_linear` does, written in Gluon, for what Triton does not say: which warps do what, and
that integers are made in the registers of which tensor cores take them.

    copying warp    words and rows of step k+1, k+2, ... into a ring in shared memory
    four warps      integers(k), products(k)               |  integers(k+1), products(k+1)
    four others                        integers(k), products(k)               |  integers(k+1), ...

Each four make half of a program's outputs, and wait for nobody but the copies: while one half makes
integers, the tensor cores multiply for the other. Where outputs are too few for all
multiprocessors, programs share a tile: each adds up a part of the inputs, and the last one that is
done adds the parts, in their order, so that no result depends on who was last.
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
from .tiles import HopperInt8Tile

HALF = gl.constexpr(64)
"""Outputs that four warps make."""
GROUP = gl.constexpr(64)
"""Inputs of 16 words, see `int8_weight`."""
BAND = gl.constexpr(8)
"""Tiles of rows that run side by side, so that they find words and rows in the L2 cache."""
INPUTS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
all_threads = getattr(gl, "thread_barrier", None) or gl.barrier  # its name before and since 3.7


def hopper_int8(
    hidden: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    tile: HopperInt8Tile,
    pdl: bool = False,
) -> torch.Tensor:
    """As `int8_linear`, in bf16. Rows of `hidden`, and outputs, begin at multiples of 16 bytes."""
    num_tokens, in_size = hidden.shape
    out_size = len(weight)
    output = hidden.new_empty(num_tokens, out_size)
    num_down, num_across = ceil_div(num_tokens, tile.rows), ceil_div(out_size, tile.columns)
    num_tiles = num_down * num_across
    num_shared = num_tiles if tile.num_parts > 1 else 0
    assert 2 * num_shared <= len(weight.arrivals)
    parts_shape = (num_shared, tile.num_parts, tile.columns, tile.rows)
    _hopper_int8_kernel[(num_tiles, tile.num_parts)](
        boxes(hidden, [tile.rows, tile.depth], INPUTS.value),
        boxes(weight.words, [HALF.value, tile.depth // 4], WORDS.value),
        boxes(output, [tile.rows, HALF.value], INPUTS.value),
        weight.scale, bias,
        hidden.new_empty(parts_shape, dtype=torch.float32), weight.arrivals,
        out_size, num_down, ceil_div(in_size, tile.depth),
        ROWS=tile.rows,
        DEPTH=tile.depth,
        STAGES=tile.num_stages,
        HAS_BIAS=bias is not None,
        PDL=pdl,
        num_warps=4,
        **launch_options(pdl),
    )  # fmt: skip
    return output


def boxes(matrix: torch.Tensor, box: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """How the copy engine takes boxes from a matrix, or brings them. Outside of it are zeros."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)


@gluon.jit(do_not_specialize=["num_down", "num_steps"])
def _hopper_int8_kernel(
    hidden_boxes, word_boxes, output_boxes, scale, bias, parts, arrivals,
    out_size, num_down, num_steps,
    ROWS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DEPTH], INPUTS)
    w = gl.allocate_shared_memory(gl.int32, [2 * STAGES, HALF, DEPTH // 4], WORDS)
    result = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, HALF], INPUTS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    fence_async_shared()
    ring = (x, w, full, empty)
    corner = _corner(num_down, ROWS)
    part, num_parts = gl.program_id(1), gl.num_programs(1)
    steps = (part * num_steps // num_parts, (part + 1) * num_steps // num_parts)
    store = (output_boxes, scale, bias, parts, arrivals, out_size)
    first, second = result.index(0), result.index(1)
    gl.warp_specialize([
        (_multiply, (0, ring, corner, steps, first, store, ROWS, DEPTH, STAGES, HAS_BIAS)),
        (_multiply, (1, ring, corner, steps, second, store, ROWS, DEPTH, STAGES, HAS_BIAS)),
        (_copy, (hidden_boxes, word_boxes, ring, corner, steps, ROWS, DEPTH, STAGES, PDL)),
    ], worker_num_warps=[4, 1], worker_num_regs=[232, 24])  # fmt: skip


@gluon.jit
def _corner(num_down, ROWS: gl.constexpr):
    """The first row of a program's tile, and the first output."""
    num_across = gl.num_programs(0) // num_down
    band, place = gl.program_id(0) // (BAND * num_across), gl.program_id(0) % (BAND * num_across)
    height = gl.minimum(num_down - band * BAND, BAND)
    return (band * BAND + place % height) * ROWS, place // height * (2 * HALF)


@gluon.jit
def _copy(
    hidden_boxes, word_boxes, ring, corner, steps,
    ROWS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Let the copy engine fill the ring, a stage as soon as both halves are done with it."""
    x, w, full, empty = ring
    row, column = corner
    first, last = steps
    if PDL:
        for early in gl.static_range(STAGES):
            if first + early < last:
                _copy_words(word_boxes, column, first + early, w, full, early, ROWS, DEPTH)
        wait_for_previous()
    for number in range(last - first):
        stage = number % STAGES
        mbarrier.wait(empty.index(stage), (number // STAGES & 1) ^ 1)
        if not PDL or number >= STAGES:
            _copy_words(word_boxes, column, first + number, w, full, stage, ROWS, DEPTH)
        place = [row, (first + number) * DEPTH]
        tma.async_copy_global_to_shared(hidden_boxes, place, full.index(stage), x.index(stage))


@gluon.jit
def _copy_words(word_boxes, column, step, w, full, stage, ROWS: gl.constexpr, DEPTH: gl.constexpr):
    """The words of a step, of both halves; its barrier expects the rows, too."""
    barrier, word = full.index(stage), step * (DEPTH // 4)
    mbarrier.expect(barrier, (2 * ROWS + 2 * HALF) * DEPTH)
    tma.async_copy_global_to_shared(word_boxes, [column, word], barrier, w.index(2 * stage))
    tma.async_copy_global_to_shared(
        word_boxes, [column + HALF, word], barrier, w.index(2 * stage + 1)
    )


@gluon.jit
def _multiply(
    half: gl.constexpr, ring, corner, steps, result, store,
    ROWS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    GROUPS: gl.constexpr = DEPTH // GROUP
    x, w, full, empty = ring
    # In memory, groups of a stage lie behind each other.
    x = x._reinterpret(gl.bfloat16, [STAGES * GROUPS, ROWS, GROUP], INPUTS)
    w = w._reinterpret(gl.int32, [2 * STAGES * GROUPS, HALF, GROUP // 4], WORDS)
    sums = gl.zeros([HALF, ROWS], gl.float32, SUMS)
    for number in range(steps[1] - steps[0]):
        stage = number % STAGES
        inputs, words = stage * GROUPS, (2 * stage + half) * GROUPS
        mbarrier.wait(full.index(stage), number // STAGES & 1)
        used: gl.tuple = ()
        for group in gl.static_range(GROUPS):
            integers = _integers(w.index(words + group).load(gl.DotOperandLayout(0, SUMS, 2)))
            for i in gl.static_range(4):
                rows = x.index(inputs + group).slice(16 * i, 16, dim=1).permute((1, 0))
                sums = warpgroup_mma(integers[i], rows, sums, is_async=True)
            used += integers
        used += (sums,)  # registers in which something is going on until the wait
        sums = warpgroup_mma_wait(0, deps=used)[4 * GROUPS]
        mbarrier.arrive(empty.index(stage), count=1)
    output_boxes, scale, bias, parts, arrivals, out_size = store
    part, num_parts = gl.program_id(1), gl.num_programs(1)
    is_last = True
    if num_parts > 1:
        tile = 2 * gl.program_id(0) + half
        outputs = gl.arange(0, HALF, layout=gl.SliceLayout(1, SUMS))[:, None]
        rows = gl.arange(0, ROWS, layout=gl.SliceLayout(0, SUMS))[None, :]
        places = parts + (tile * num_parts * HALF + outputs) * ROWS + rows
        gl.store(places + part * HALF * ROWS, sums)
        all_threads()
        is_last = gl.atomic_add(arrivals + tile, 1, sem="acq_rel", scope="gpu") == num_parts - 1
        if is_last:
            gl.store(arrivals + tile, 0)
            sums = gl.zeros([HALF, ROWS], gl.float32, SUMS)
            for each in range(num_parts):
                sums += gl.load(places + each * HALF * ROWS, cache_modifier=".cg")
    if is_last:
        row, column = corner
        column += half * HALF
        columns = column + gl.arange(0, HALF, layout=gl.SliceLayout(1, SUMS))
        columns = gl.minimum(columns, out_size - 1)
        sums = sums * gl.load(scale + columns)[:, None]
        if HAS_BIAS:
            sums += gl.load(bias + columns).to(gl.float32)[:, None]
        result.permute((1, 0)).store(sums.to(gl.bfloat16))
        fence_async_shared()
        all_threads()
        tma.async_copy_shared_to_global(output_boxes, [row, column], result)
        tma.store_wait(0)


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
