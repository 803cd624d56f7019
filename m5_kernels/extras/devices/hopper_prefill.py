"""Paged prefill for Hopper: loads, matrix products and softmax at the same time.

It computes what `paged_prefill` does, and is written in Gluon, where code says which warps do what.
The tensor cores of a Hopper GPU are so fast that a program leaves them idle for a third of the time
if it multiplies, then exponentiates, then multiplies again. Here a program has three parts, each
with warps and registers of its own:

    producer    1 warp    K0 V0 K1 V1 K2 V2 ...      the copy engine (TMA) brings pages of KV
    consumer 0  4 warps   QK0 | QK1 softmax0 PV0 | QK2 softmax1 PV1 | ...     query rows 0..63
    consumer 1  4 warps      QK0 | QK1 softmax0 PV0 | QK2 softmax1 PV1 | ...  query rows 64..127

Inside a consumer (`hopper_consumers`) the product of the next tile, QK1, runs while softmax0 is
computed. The two consumers alternate: one multiplies while the other exponentiates. Producer and
consumers share a ring of `STAGES` tiles of keys and values. For each tile, one barrier says when it
is full, and another when both consumers have read it.

Programs are persistent: there is one on each multiprocessor, and it takes tile after tile from a
list (`prefill_tiles`). So the producer loads the beginning of the next tile while consumers finish
this one.

Pages (KV blocks) need not be gathered. In shared memory a tile of keys is rows of 64 columns, one
below the other. So each page of 16 tokens is copied to its own rows, and the tensor cores see one
tile. Slots after the end of a context may hold anything: scores of such keys are masked, and such
values are replaced by zeros, since 0 x NaN is NaN. Paper: Shah et al., FlashAttention-3 (2024).
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.paged_prefill import LOG2_E
from m5_kernels.kernels.triton_or_twin import num_multiprocessors

from .hopper_boxes import SWIZZLED, all_threads, boxes
from .hopper_consumers import ROWS, STAGES, TILE, consume, num_walked, tile_of

COLUMNS = gl.constexpr(64)
"""Columns of a box."""


def hopper_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    tiles: torch.Tensor,
    scale: float,
    output: torch.Tensor,
    launch: Launch = PLAIN,
) -> None:
    """Compute causal attention of each chunk over its context, into `output`.

    query, output: `[num_tokens, num_q_heads, head_dim]`, last dimension contiguous; key_cache,
    value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, contiguous; block_table: int32
    `[num_seqs, max_blocks]`; tiles: of `prefill_tiles`. Only call it where `runs_on_hopper` is
    true.
    """
    num_tokens, num_q_heads, head_dim = query.shape
    num_blocks, block_size, num_kv_heads, _ = key_cache.shape
    num_slots, width = num_blocks * block_size, num_kv_heads * head_dim
    rows = query.as_strided((num_tokens, num_q_heads * head_dim), (query.stride(0), 1))
    keys, values = (cache.view(num_slots, width) for cache in (key_cache, value_cache))
    num_items = len(tiles) * num_q_heads
    query_box, page = [ROWS.value, COLUMNS.value], [block_size, COLUMNS.value]
    launch.kernel(_hopper_prefill_kernel, (min(num_multiprocessors(query.device), num_items),))(
        boxes(rows, query_box, SWIZZLED.value), boxes(keys, page, SWIZZLED.value),
        boxes(values, page, SWIZZLED.value), values, block_table, tiles, output,
        num_items, num_q_heads, scale * LOG2_E, num_slots,
        block_table.stride(0), output.stride(0), output.stride(1),
        GROUP=num_q_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        num_warps=4,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_items"])
def _hopper_prefill_kernel(
    query_boxes, key_boxes, value_boxes, values, block_table, tiles, output,
    num_items, num_q_heads, scale, num_slots, table_stride, output_stride, output_head_stride,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = TILE // BLOCK_SIZE
    PARTS: gl.constexpr = HEAD_DIM // COLUMNS
    dtype: gl.constexpr = key_boxes.dtype
    # The same memory in two views: boxes, into which pages are copied, and tiles to be multiplied.
    q_boxes = gl.allocate_shared_memory(dtype, [2 * PARTS, ROWS, COLUMNS], SWIZZLED)
    k_boxes = gl.allocate_shared_memory(
        dtype, [STAGES * PARTS * PAGES, BLOCK_SIZE, COLUMNS], SWIZZLED
    )
    v_boxes = gl.allocate_shared_memory(
        dtype, [STAGES * PARTS * PAGES, BLOCK_SIZE, COLUMNS], SWIZZLED
    )
    q = q_boxes._reinterpret(dtype, [2, ROWS, HEAD_DIM], SWIZZLED)
    k = k_boxes._reinterpret(dtype, [STAGES, TILE, HEAD_DIM], SWIZZLED)
    v = v_boxes._reinterpret(dtype, [STAGES, TILE, HEAD_DIM], SWIZZLED)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_empty.index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)  # both consumers
        mbarrier.init(v_empty.index(i), count=2)
    barriers = (k_full, k_empty, v_full, v_empty)
    work = (tiles, num_items, num_q_heads)
    store = (output, output_stride, output_head_stride, scale)
    full = (q_full.index(0), q_full.index(1))
    empty = (q_empty.index(0), q_empty.index(1))
    gl.warp_specialize([
        (consume, (q.index(0), k, v, full[0], empty[0], barriers, work, store, 0, HEAD_DIM)),
        (consume, (q.index(1), k, v, full[1], empty[1], barriers, work, store, ROWS, HEAD_DIM)),
        (_producer, (
            query_boxes, key_boxes, value_boxes, values, block_table, table_stride, num_slots,
            q_boxes, k_boxes, v_boxes, q_full, q_empty, barriers, work,
            GROUP, HEAD_DIM, WIDTH, BLOCK_SIZE,
        )),
    ], worker_num_warps=[4, 1], worker_num_regs=[232, 40])  # fmt: skip


@gluon.jit
def _producer(
    query_boxes, key_boxes, value_boxes, values, block_table, table_stride, num_slots,
    q_boxes, k_boxes, v_boxes, q_full, q_empty, barriers, work,
    GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_SIZE: gl.constexpr,
):  # fmt: skip
    PAGES: gl.constexpr = TILE // BLOCK_SIZE
    PARTS: gl.constexpr = HEAD_DIM // COLUMNS
    k_full, k_empty, v_full, v_empty = barriers
    num_done, num_loaded = 0, 0
    for turn in range(gl.cdiv(work[1], gl.num_programs(0))):
        head, first_row, num_rows, position, seq = tile_of(turn, work)
        if num_rows > 0:
            for consumer in gl.static_range(2):
                mbarrier.wait(q_empty.index(consumer), (num_done & 1) ^ 1)
                mbarrier.expect(q_full.index(consumer), ROWS * HEAD_DIM * 2)
                for part in gl.static_range(PARTS):
                    tma.async_copy_global_to_shared(
                        query_boxes,
                        [first_row + consumer * ROWS, head * HEAD_DIM + part * COLUMNS],
                        q_full.index(consumer),
                        q_boxes.index(consumer * PARTS + part),
                    )
            num_done += 1
            column = head // GROUP * HEAD_DIM
            table = block_table + seq * table_stride
            context_len = position + num_rows
            last_page = (context_len - 1) // BLOCK_SIZE
            for tile in range(num_walked(position, num_rows)):
                stage, phase = num_loaded % STAGES, (num_loaded // STAGES) & 1
                num_loaded += 1
                full = k_full.index(stage)
                mbarrier.wait(k_empty.index(stage), phase ^ 1)
                mbarrier.expect(full, TILE * HEAD_DIM * 2)
                for i in gl.static_range(PAGES):
                    slot = gl.load(table + gl.minimum(tile * PAGES + i, last_page)) * BLOCK_SIZE
                    for part in gl.static_range(PARTS):
                        tma.async_copy_global_to_shared(
                            key_boxes,
                            [slot, column + part * COLUMNS],
                            full,
                            k_boxes.index((stage * PARTS + part) * PAGES + i),
                        )
                full = v_full.index(stage)
                mbarrier.wait(v_empty.index(stage), phase ^ 1)
                end = context_len - tile * TILE
                if (end >= TILE) | (end % BLOCK_SIZE == 0):
                    mbarrier.expect(full, TILE * HEAD_DIM * 2)
                else:  # copy the page in which the context ends by hand, with zeros after the end
                    LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
                    rows = gl.arange(0, BLOCK_SIZE, layout=gl.SliceLayout(1, LANES))[:, None]
                    columns = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LANES))[None, :]
                    last_slot = gl.load(table + last_page).to(gl.int64) * BLOCK_SIZE
                    for part in gl.static_range(PARTS):
                        page = gl.load(
                            values + (last_slot + rows) * WIDTH + column + part * COLUMNS + columns,
                            mask=(rows < end % BLOCK_SIZE) & (columns < COLUMNS),
                            other=0.0,
                        )
                        place = (stage * PARTS + part) * PAGES + end // BLOCK_SIZE
                        v_boxes.index(place).store(page)
                    fence_async_shared()
                    all_threads()
                    mbarrier.expect(full, (TILE - BLOCK_SIZE) * HEAD_DIM * 2)
                for i in gl.static_range(PAGES):
                    page_number = tile * PAGES + i
                    slot = gl.load(table + gl.minimum(page_number, last_page)) * BLOCK_SIZE
                    slot = gl.where(page_number <= last_page, slot, num_slots)  # outside: zeros
                    is_whole = (i * BLOCK_SIZE >= end) | ((i + 1) * BLOCK_SIZE <= end)
                    for part in gl.static_range(PARTS):
                        tma.async_copy_global_to_shared(
                            value_boxes,
                            [slot, column + part * COLUMNS],
                            full,
                            v_boxes.index((stage * PARTS + part) * PAGES + i),
                            pred=is_whole,
                        )
