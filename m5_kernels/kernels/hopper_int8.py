"""Products of many rows with weights in eight bits, on Hopper.

What `int8_linear` does, written in Gluon, for what Triton does not say: integers are made in the
registers of which tensor cores take them, and the copy engine is steps ahead:

    TMA             words and rows of step k+3 into a ring in shared memory
    other units     words(k) -> integers(k), in registers
    tensor cores    sums += integers(k) x rows(k)

The integers of step k+1 stand between the products of step k and the wait for them, so that both
could go on at once. Of today's compiler that is not to be had: it moves the wait before them.
Integers go from registers, rows from shared memory; sums stay in registers.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .backend import ceil_div
from .int8_weight import WORDS_TO_BF16, Int8Weight
from .tiles import Int8Tile

DEPTH = gl.constexpr(64)
"""Inputs of a step: a group of 16 words, see `int8_weight`."""
INPUTS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=32, rank=2))
all_threads = getattr(gl, "thread_barrier", None) or gl.barrier  # its name before and since 3.7


def hopper_int8(
    hidden: torch.Tensor,
    weight: Int8Weight,
    bias: torch.Tensor | None,
    tile: Int8Tile,
) -> torch.Tensor:
    """As `int8_linear`, for hidden states in bf16 whose rows begin at multiples of 16 bytes."""
    num_tokens, in_size = hidden.shape
    out_size = len(weight)
    output = hidden.new_empty(num_tokens, out_size)
    _hopper_int8_kernel[(ceil_div(out_size, tile.columns), ceil_div(num_tokens, tile.rows))](
        _boxes(hidden, [tile.rows, DEPTH.value], INPUTS.value),
        _boxes(weight.words, [tile.columns, DEPTH.value // 4], WORDS.value),
        weight.scale, bias, output,
        num_tokens, out_size, ceil_div(in_size, DEPTH.value),
        COLUMNS=tile.columns,
        ROWS=tile.rows,
        STAGES=tile.num_stages,
        HAS_BIAS=bias is not None,
        num_warps=tile.num_warps,
    )  # fmt: skip
    return output


def _boxes(matrix: torch.Tensor, box: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    """How the copy engine takes boxes from a matrix."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), box, layout)


@gluon.jit(do_not_specialize=["num_tokens"])
def _hopper_int8_kernel(
    hidden_boxes, word_boxes, scale, bias, output,
    num_tokens, out_size, num_steps,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
    HAS_BIAS: gl.constexpr,
    num_warps: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, ROWS, 16])
    column, row = gl.program_id(0) * COLUMNS, gl.program_id(1) * ROWS
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DEPTH], INPUTS)
    w = gl.allocate_shared_memory(gl.int32, [STAGES, COLUMNS, DEPTH // 4], WORDS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    boxes = (hidden_boxes, word_boxes, row, column)
    for step in gl.static_range(STAGES - 1):
        _load(boxes, step, num_steps, x, w, full, COLUMNS, ROWS, STAGES)
    sums = gl.zeros([COLUMNS, ROWS], gl.float32, SUMS)
    w0, w1, w2, w3 = _integers(w, full, 0, SUMS, STAGES)
    for step in range(num_steps):
        tile = x.index(step % STAGES)
        sums = warpgroup_mma(w0, _part(tile, 0), sums, is_async=True)
        sums = warpgroup_mma(w1, _part(tile, 1), sums, is_async=True)
        sums = warpgroup_mma(w2, _part(tile, 2), sums, is_async=True)
        sums = warpgroup_mma(w3, _part(tile, 3), sums, is_async=True)
        all_threads()  # have waited for the products of the step before
        _load(boxes, step + STAGES - 1, num_steps, x, w, full, COLUMNS, ROWS, STAGES)
        next_step = gl.minimum(step + 1, num_steps - 1)
        n0, n1, n2, n3 = _integers(w, full, next_step, SUMS, STAGES)
        sums, w0, w1, w2, w3 = warpgroup_mma_wait(0, deps=[sums, w0, w1, w2, w3])
        w0, w1, w2, w3 = n0, n1, n2, n3
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, SUMS))
    last = gl.minimum(columns, out_size - 1)
    result = sums * gl.load(scale + last)[:, None]
    if HAS_BIAS:
        result += gl.load(bias + last).to(gl.float32)[:, None]
    LANES: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, num_warps], [0, 1])
    result = gl.convert_layout(result.to(gl.bfloat16), LANES)
    columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, LANES))[:, None]
    rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(0, LANES))[None, :]
    places = output + rows.to(gl.int64) * out_size + columns
    gl.store(places, result, mask=(rows < num_tokens) & (columns < out_size))


@gluon.jit
def _load(
    boxes, step, num_steps, x, w, full,
    COLUMNS: gl.constexpr,
    ROWS: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Let the copy engine bring what a step needs, if there is such a step."""
    hidden_boxes, word_boxes, row, column = boxes
    stage, is_step = step % STAGES, step < num_steps
    barrier = full.index(stage)
    mbarrier.expect(barrier, (ROWS * 2 + COLUMNS) * DEPTH, pred=is_step)
    tma.async_copy_global_to_shared(
        hidden_boxes, [row, step * DEPTH], barrier, x.index(stage), pred=is_step
    )
    tma.async_copy_global_to_shared(
        word_boxes, [column, step * (DEPTH // 4)], barrier, w.index(stage), pred=is_step
    )


@gluon.jit
def _part(tile, number: gl.constexpr):
    """The inputs of a byte of the words, `[16, ROWS]`."""
    return tile.slice(16 * number, 16, dim=1).permute((1, 0))


@gluon.jit
def _integers(w, full, step, SUMS: gl.constexpr, STAGES: gl.constexpr):
    """The integers of a step, once its words are there, as the tensor cores take them."""
    mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
    words = w.index(step % STAGES).load(gl.DotOperandLayout(0, SUMS, 2))
    return gl.inline_asm_elementwise(
        WORDS_TO_BF16,
        "=r,=r,=r,=r,r,r",
        [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
