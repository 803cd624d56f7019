"""Matrix products and softmax of `hopper_prefill`: what its two consumers do, and for which tiles.

    consumer 0    QK0 | QK1 softmax0 PV0 | QK2 softmax1 PV1 | ...     query rows 0..63
    consumer 1       QK0 | QK1 softmax0 PV0 | QK2 softmax1 PV1 | ...  query rows 64..127

The tensor cores start on the next tile's scores before this tile's softmax begins. For each tile of
keys and values, one barrier says when it has arrived, and another when both consumers are done.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_prefill_tiles import QUERIES

ROWS = gl.constexpr(QUERIES // 2)
"""Query rows of a consumer: as many as one matrix instruction of four warps takes."""
TILE = gl.constexpr(128)
"""Number of keys and values of a tile."""
STAGES = gl.constexpr(3)
"""Tiles in flight."""


@gluon.jit
def tile_of(turn, work):
    """Return what this program does in its turn: a head, and a row of `prefill_tiles`."""
    tiles, num_items, num_q_heads = work
    # Back and forth, so that no program has the longest tile of each turn.
    last = gl.num_programs(0) - 1
    place = gl.where(turn % 2 == 0, gl.program_id(0), last - gl.program_id(0))
    item = turn * (last + 1) + place
    is_item = item < num_items
    tile = tiles + gl.minimum(item, num_items - 1) // num_q_heads * 4
    num_rows = gl.where(is_item, gl.load(tile + 1), 0)
    return item % num_q_heads, gl.load(tile), num_rows, gl.load(tile + 2), gl.load(tile + 3)


@gluon.jit
def num_walked(position, num_rows):
    """Return how many tiles of keys a tile of queries sees, up to the last token of either."""
    return gl.cdiv(position + gl.minimum(2 * ROWS, num_rows), TILE)


@gluon.jit
def consume(q, k, v, q_full, q_empty, barriers, work, store, row, HEAD_DIM: gl.constexpr):
    """Attend for 64 query rows of each tile of this program, beginning with `row`."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    RESULT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    k_full, k_empty, _v_full, _v_empty = barriers
    output, output_stride, output_head_stride, scale = store
    num_done, num_read = 0, 0
    for turn in range(gl.cdiv(work[1], gl.num_programs(0))):
        head, first_row, num_rows, position, _seq = tile_of(turn, work)
        if num_rows > 0:
            num_tiles = num_walked(position, num_rows)
            position += row
            positions = position + gl.arange(0, ROWS, layout=gl.SliceLayout(1, SCORES))
            result = gl.zeros([ROWS, HEAD_DIM], gl.float32, RESULT)
            row_max = gl.full([ROWS], -1.0e30, gl.float32, gl.SliceLayout(1, SCORES))
            row_sum = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, SCORES))
            stage = num_read % STAGES
            mbarrier.wait(q_full, num_done & 1)
            mbarrier.wait(k_full.index(stage), (num_read // STAGES) & 1)
            scores = gl.zeros([ROWS, TILE], gl.float32, SCORES)
            scores = warpgroup_mma(q, k.index(stage).permute((1, 0)), scores, use_acc=False)
            mbarrier.arrive(k_empty.index(stage), count=1)
            first_masked = gl.minimum((position + 1) // TILE, num_tiles - 1)
            for tile in range(first_masked):
                scores, result, row_max, row_sum = _attend(
                    q, k, v, barriers, num_read + tile, tile, scores, result, row_max, row_sum,
                    positions, scale, False, False, SCORES, RESULT,
                )  # fmt: skip
            for tile in range(first_masked, num_tiles - 1):
                scores, result, row_max, row_sum = _attend(
                    q, k, v, barriers, num_read + tile, tile, scores, result, row_max, row_sum,
                    positions, scale, True, False, SCORES, RESULT,
                )  # fmt: skip
            mbarrier.arrive(q_empty, count=1)
            num_read += num_tiles
            num_done += 1
            scores, result, row_max, row_sum = _attend(
                q, k, v, barriers, num_read - 1, num_tiles - 1, scores, result, row_max, row_sum,
                positions, scale, True, True, SCORES, RESULT,
            )  # fmt: skip
            result = result / gl.convert_layout(row_sum, gl.SliceLayout(1, RESULT))[:, None]
            rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, RESULT))[:, None]
            columns = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, RESULT))[None, :]
            place = (first_row + rows).to(gl.int64) * output_stride + head * output_head_stride
            gl.store(
                output + place + columns,
                result.to(output.dtype.element_ty),
                mask=(rows < num_rows) & (columns < HEAD_DIM),
            )


@gluon.jit
def _attend(
    q, k, v, barriers, number, tile, scores, result, row_max, row_sum, positions, scale,
    IS_MASKED: gl.constexpr,
    IS_LAST: gl.constexpr,
    SCORES: gl.constexpr,
    RESULT: gl.constexpr,
):  # fmt: skip
    """Compute the softmax of a tile of keys' scores and its product with the values; start the
    next.

    number: counts tiles since the program began. It says where in the ring the tile is.
    Returns the scores of the next tile, and the three states of online softmax.
    """
    k_full, k_empty, v_full, v_empty = barriers
    stage, next_stage = number % STAGES, (number + 1) % STAGES
    if not IS_LAST:  # runs while softmax is computed
        mbarrier.wait(k_full.index(next_stage), ((number + 1) // STAGES) & 1)
        next_scores = warpgroup_mma(
            q, k.index(next_stage).permute((1, 0)), gl.zeros_like(scores),
            use_acc=False, is_async=True,
        )  # fmt: skip
    if IS_MASKED:
        columns = tile * TILE + gl.arange(0, TILE, layout=gl.SliceLayout(0, SCORES))
        scores = gl.where(columns[None, :] <= positions[:, None], scores, -float("inf"))
    new_max = gl.maximum(row_max, gl.max(scores, 1))
    rescale = gl.exp2((row_max - new_max) * scale)
    weights = gl.exp2(scores * scale - (new_max * scale)[:, None])
    row_sum = row_sum * rescale + gl.sum(weights, 1)
    result = result * gl.convert_layout(rescale, gl.SliceLayout(1, RESULT))[:, None]
    weights = gl.convert_layout(weights.to(v.dtype), gl.DotOperandLayout(0, RESULT, 2))
    mbarrier.wait(v_full.index(stage), (number // STAGES) & 1)
    result = warpgroup_mma(weights, v.index(stage), result, is_async=True)
    if not IS_LAST:
        scores = warpgroup_mma_wait(1, deps=[next_scores])
        mbarrier.arrive(k_empty.index(next_stage), count=1)
    result = warpgroup_mma_wait(0, deps=[result])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return scores, result, new_max, row_sum
