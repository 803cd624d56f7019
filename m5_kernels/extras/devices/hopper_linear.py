"""Linear layers of 17 to 256 rows with small weights, on Hopper: weights are loaded early.

With so few rows a layer is a chain of load, multiply and store, and half of its time is waiting:
for the launch, then for the first part of the weight. But no kernel of a step writes a weight. So a
separate warp, which only copies, loads the weight while the previous kernel still computes:

    copying warp    weight of steps 0, 1, 2 ...  | waits |  rows of steps 0, 1, 2 ...
    four warps                                              products of step 0, of step 1, ...

Bytes in flight decide here, more than reads from the L2 cache. So a tile has 64 rows, and more
programs run at once, though several programs then read the same weight. Each sums all inputs in
order, so a row has the same bits with any tile and any number of rows. With `part_size` each part
of so many inputs has a sum of its own, and these are added from first to last. The same program
multiplies with gate and up, and computes SiLU * mul of the two.
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

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.silu_mul import gated
from m5_kernels.kernels.triton_or_twin import ceil_div

from .few_rows_tiles import HopperTile, hopper_tile
from .hopper_boxes import NARROW, SWIZZLED, all_threads, boxes

ROWS = gl.constexpr(64)
"""Rows of a tile: the fewest that the tensor cores of four warps multiply."""
NUM_REGISTERS = 128
"""Registers of a thread: half of what there are, since the previous kernel still has its own."""


def hopper_linear(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    is_gated: bool = False,
    tile: HopperTile | None = None,
    part_size: int | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Return `hidden @ weight.T + bias` in bf16, or silu(gate) * up of it.

    All rows, of the output too, must begin at multiples of 16 bytes. part_size: inputs of a part, a
    multiple of 128.
    """
    num_tokens, in_size = hidden.shape
    size = len(weight) // 2 if is_gated else len(weight)
    tile = tile or hopper_tile(num_tokens, size, is_gated)
    output = hidden.new_empty(num_tokens, size)
    layout = (SWIZZLED if tile.columns > 32 else NARROW).value
    num_down = ceil_div(num_tokens, ROWS.value)
    launch.kernel(_hopper_linear_kernel, (num_down * ceil_div(size, tile.columns),))(
        boxes(hidden, [ROWS.value, tile.depth], SWIZZLED.value),
        boxes(weight, [tile.columns, tile.depth], SWIZZLED.value),
        boxes(output, [ROWS.value, tile.columns], layout),
        bias, size, num_down, ceil_div(in_size, tile.depth),
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        STAGES=tile.num_stages,
        PART_STEPS=part_size // tile.depth if part_size else 0,
        OUTPUTS=layout,
        IS_GATED=is_gated,
        num_warps=4,
        maxnreg=NUM_REGISTERS,
        **launch.pdl_options(),
    )  # fmt: skip
    return output


@gluon.jit(do_not_specialize=["num_down", "num_steps"])
def _hopper_linear_kernel(
    hidden_boxes, weight_boxes, output_boxes, bias, size, num_down, num_steps,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PART_STEPS: gl.constexpr,
    OUTPUTS: gl.constexpr,
    IS_GATED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    MATRICES: gl.constexpr = 1 + IS_GATED  # gate, or gate and up, whose rows begin at row `size`
    x = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, DEPTH], SWIZZLED)
    w = gl.allocate_shared_memory(gl.bfloat16, [STAGES * MATRICES, COLUMNS, DEPTH], SWIZZLED)
    result = gl.allocate_shared_memory(gl.bfloat16, [ROWS, COLUMNS], OUTPUTS)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    fence_async_shared()
    ring = (x, w, full, empty)
    # Programs with the same part of the weight run next to each other: one reads it from memory.
    corner = (gl.program_id(0) % num_down * ROWS, gl.program_id(0) // num_down * COLUMNS)
    store = (output_boxes, bias, result, size)
    gl.warp_specialize([
        (_multiply, (ring, corner, num_steps, store, COLUMNS, STAGES, PART_STEPS, MATRICES)),
        (_copy, (hidden_boxes, weight_boxes, size, ring, corner, num_steps, STAGES, MATRICES, PDL)),
    ], worker_num_warps=[1], worker_num_regs=[40])  # fmt: skip


@gluon.jit
def _copy(
    hidden_boxes, weight_boxes, size, ring, corner, num_steps,
    STAGES: gl.constexpr,
    MATRICES: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Let the copy engine fill the ring: each stage again as soon as it has been multiplied."""
    x, w, full, empty = ring
    DEPTH: gl.constexpr = x.shape[2]
    row, column = corner
    for early in gl.static_range(STAGES):
        if early < num_steps:
            _copy_weight(weight_boxes, size, w, full, column, early, early, DEPTH, MATRICES)
    wait_for_previous(PDL)
    for step in range(num_steps):
        stage = step % STAGES
        if step >= STAGES:
            mbarrier.wait(empty.index(stage), (step // STAGES & 1) ^ 1)
            _copy_weight(weight_boxes, size, w, full, column, step, stage, DEPTH, MATRICES)
        place = [row, step * DEPTH]
        tma.async_copy_global_to_shared(hidden_boxes, place, full.index(stage), x.index(stage))


@gluon.jit
def _copy_weight(
    weight_boxes, size, w, full, column, step, stage, DEPTH: gl.constexpr, MATRICES: gl.constexpr
):
    """Copy the weight of a step. Its barrier expects the rows as well."""
    barrier = full.index(stage)
    mbarrier.expect(barrier, 2 * (ROWS + MATRICES * w.shape[1]) * DEPTH)
    for part in gl.static_range(MATRICES):
        place = [column + part * size, step * DEPTH]
        tma.async_copy_global_to_shared(
            weight_boxes, place, barrier, w.index(MATRICES * stage + part)
        )


@gluon.jit
def _multiply(
    ring, corner, num_steps, store,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    PART_STEPS: gl.constexpr,
    MATRICES: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    if PART_STEPS:
        sums = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
        up = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
        for first in range(0, num_steps, PART_STEPS):
            end = gl.minimum(first + PART_STEPS, num_steps)
            part, up_part = _sum(ring, first, end, COLUMNS, STAGES, MATRICES, SUMS)
            sums += part
            up += up_part
    else:
        sums, up = _sum(ring, 0, num_steps, COLUMNS, STAGES, MATRICES, SUMS)
    row, column = corner
    output_boxes, bias, result, size = store
    if bias is not None:
        columns = column + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, SUMS))
        columns = gl.minimum(columns, size - 1)
        sums += gl.load(bias + columns).to(gl.float32)[None, :]
        if MATRICES == 2:
            up += gl.load(bias + size + columns).to(gl.float32)[None, :]
    if MATRICES == 2:
        sums = gated(sums.to(gl.bfloat16), up.to(gl.bfloat16))
    result.store(sums.to(gl.bfloat16))
    fence_async_shared()
    all_threads()
    tma.async_copy_shared_to_global(output_boxes, [row, column], result)
    tma.store_wait(0)


@gluon.jit
def _sum(
    ring, first, end,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    MATRICES: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """Return the products of these steps with gate and up, the second zeros without a gate."""
    x, w, full, empty = ring
    sums = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
    up = gl.zeros([ROWS, COLUMNS], gl.float32, SUMS)
    for step in range(first, end):
        stage = step % STAGES
        mbarrier.wait(full.index(stage), step // STAGES & 1)
        rows = x.index(stage)
        sums = warpgroup_mma(rows, w.index(MATRICES * stage).permute((1, 0)), sums, is_async=True)
        if MATRICES == 2:
            up = warpgroup_mma(rows, w.index(2 * stage + 1).permute((1, 0)), up, is_async=True)
        # The previous step is done now; this step is not waited for.
        sums, up = warpgroup_mma_wait(MATRICES, deps=(sums, up))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    return warpgroup_mma_wait(0, deps=(sums, up))
