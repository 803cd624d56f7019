"""Attention whose sums depend on a query's position alone: contexts are cut at fixed positions.

    context        |- 0 -|- 1 -|- 2 -|- 3 -|---------- split 4 ----------|---- split 5 ---
    tokens         0    128   256   384   512                          1024
    sums           tile after tile, from 0 in each split
    merge          ((split 0 + split 1) + split 2) + ... + sink

`kernels.flash_decode` cuts a step's KV into equal shares, so where a context is cut depends on who
else is in the step. Here it is cut at multiples of `SPLIT`, and the first of these splits into
`NUM_FIRST`, since short contexts have nothing else to be computed at the same time. A decode row's
splits are computed by several programs, and the last one to finish merges them from first to last.
A program may also walk several, if the first split is among them, and merge in the same order. So
does a chunk's program. Tokens after a query's own add nothing: a weight of zero, and a factor of
one. So a query has the same bits as a decode row, in any chunk, and after any cached prefix.

Both kernels call the same two functions, `attend` and `merge`. What could contract to a fused
multiply-add is written as one, since a compiler may do it in one kernel and not in the other. A
tile has 64 or 128 rows, so that both multiply with the same instruction on Hopper (`tiled_linear`).
"""

from __future__ import annotations

import torch

from m5_kernels.decoder.attention import AttentionLayer, AttentionShape
from m5_kernels.kernels.flash_decode import FLOOR, flash_decode_torch
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.paged_prefill import LOG2_E, as_operand, load_sinks, paged_prefill_torch
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.step_metadata import StepMetadata
from m5_kernels.kernels.tiles import PrefillTile
from m5_kernels.kernels.triton_or_twin import (
    ceil_div,
    lanes_for,
    next_power_of_2,
    num_multiprocessors,
    tl,
    triton,
)

SPLIT = 512
"""Tokens of a split, except the first ones."""
NUM_FIRST = 4
"""Splits of the first `SPLIT` tokens."""
FEW_SEQS = 4
"""Up to so many sequences the first splits are computed at the same time. If there are more, one
program walks them."""
PROGRAMS_PER_SM = 2


def decode_tile(head_dim_pad: int, element_size: int) -> PrefillTile:
    """Return the tile of a decode row. `chunk_tile` must have as many tokens."""
    if element_size == 4 or head_dim_pad > 128:
        return PrefillTile(64, 32, 4, 2)
    return PrefillTile(64, 64, 4, 3)


def chunk_tile(head_dim_pad: int, element_size: int) -> PrefillTile:
    """Return the tile of a chunk."""
    tile = decode_tile(head_dim_pad, element_size)
    return tile if element_size == 4 else tile._replace(rows=128, num_warps=8)


class SplitAttention:
    """Takes the place of `decoder.attention.Attention`, with its arguments."""

    def __init__(
        self, shape: AttentionShape, max_num_seqs: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.arrivals: torch.Tensor | None = None
        if device.type == "cuda":  # a CUDA graph needs the same memory in each replay
            self.arrivals = torch.zeros(
                max_num_seqs * shape.num_kv_heads, dtype=torch.int32, device=device
            )

    def prepare(self, metadata: StepMetadata, launch: Launch) -> StepMetadata:
        """Return the metadata: each program finds its work by itself."""
        return metadata

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        layer: AttentionLayer,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Attend for decode rows, then for chunks. See `AttentionBackend`."""
        m, n = metadata, metadata.num_decodes
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if n:  # a chunk's tokens may be among the first n: they get zeros, overwritten below
            split_decode(
                query[:n], key_cache, value_cache, m.block_table[:n], m.decode_lens[:n],
                layer.scale, layer.window, output[:n], self.arrivals, layer.sinks, launch=launch,
            )  # fmt: skip
        if m.num_chunks:
            split_prefill(
                query, key_cache, value_cache, m.block_table, m.context_lens, m.query_start_loc,
                layer.scale, layer.window, output, m.first_chunk, m.num_chunks, layer.sinks,
                launch=launch,
            )  # fmt: skip
        return output


def split_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    output: torch.Tensor | None = None,
    arrivals: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    tile: PrefillTile | None = None,
    split: int = SPLIT,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Do what `flash_decode` does, with its arguments. The twin is the same.

    split: tokens of a split, a multiple of `NUM_FIRST` tiles.
    arrivals: int32 `[num_seqs * num_kv_heads]` at least, zero between launches; None: allocated.
    """
    if not launch.runs_triton(query):
        return flash_decode_torch(
            query, key_cache, value_cache, block_table, context_lens, scale, window, output, sinks
        )
    num_seqs, num_q_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if arrivals is None:
        arrivals = query.new_zeros(num_seqs * num_kv_heads, dtype=torch.int32)
    head_dim_pad = next_power_of_2(head_dim)
    tile = tile or decode_tile(head_dim_pad, query.element_size())
    group = num_q_heads // num_kv_heads
    group_pow2 = next_power_of_2(group)
    cut = split // NUM_FIRST if num_seqs <= FEW_SEQS else split
    max_splits = ceil_div(block_table.shape[1] * block_size, split) + split // cut - 1
    num_parts = num_seqs * max_splits * num_kv_heads * group_pow2 if max_splits > 1 else 1
    part_sums = query.new_empty(num_parts, head_dim_pad, dtype=torch.float32)
    part_norms = query.new_empty(2, num_parts, dtype=torch.float32)
    num_programs = max(1, num_multiprocessors(query.device) * PROGRAMS_PER_SM // num_kv_heads)
    launch.kernel(_split_decode_kernel, (num_programs * num_kv_heads,))(
        query, key_cache, value_cache, block_table, context_lens, output,
        part_sums, part_norms, arrivals, sinks,
        num_seqs, num_parts, max_splits,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        window or 0,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], block_table.stride(0),
        output.stride(0), output.stride(1),
        NUM_SEQS_PAD=max(16, next_power_of_2(num_seqs)),  # small numbers share one kernel
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_POW2=group_pow2,
        ROWS=max(tile.rows, group_pow2),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        BLOCK_SIZE=block_size,
        TILE=tile.tokens,
        SPLIT=split,
        FIRST=split // NUM_FIRST,
        CUT=cut,
        HAS_WINDOW=bool(window),
        IS_LARGE_CACHE=key_cache.numel() >= 2**31,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch.pdl_options(),
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_seqs", "num_parts", "max_splits"])
def _split_decode_kernel(
    query, key_cache, value_cache, block_table, context_lens, output,
    part_sums, part_norms, arrivals, sinks,
    num_seqs, num_parts, max_splits, score_scale, window,
    query_stride, query_head_stride, block_stride, slot_stride, head_stride, table_stride,
    output_stride, output_head_stride,
    NUM_SEQS_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST: tl.constexpr,
    CUT: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_LARGE_CACHE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # The splits of all sequences are numbered one after the other. Program `worker` of a KV head
    # computes each num_workers-th of them. With CUT == SPLIT the first ones count as one.
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    worker = tl.program_id(0) // NUM_KV_HEADS
    num_workers = tl.num_programs(0) // NUM_KV_HEADS
    seqs = tl.arange(0, NUM_SEQS_PAD)
    is_seq = seqs < num_seqs
    lens = tl.load(context_lens + seqs, mask=is_seq, other=0)
    # A padding row counts one split, so that a program owns it and writes its zeros.
    split_counts = split_of(tl.maximum(lens - 1, 0), SPLIT, CUT) + 1
    if HAS_WINDOW:
        split_counts -= split_of(tl.maximum(lens - window, 0), SPLIT, CUT)
    split_counts = tl.where(is_seq, split_counts, 0)
    split_ends = tl.cumsum(split_counts, 0)
    num_splits = tl.sum(split_counts, 0)
    if worker >= num_splits:
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    is_row = rows < GROUP
    row_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows
    key_head = key_cache + kv_head * head_stride
    value_head = value_cache + kv_head * head_stride
    wait_for_previous(PDL)
    for item in range(worker, num_splits, num_workers):
        seq = tl.sum(((split_ends <= item) & is_seq).to(tl.int32), 0)
        context_len = tl.load(context_lens + seq)
        first_token = tl.maximum(context_len - window, 0) if HAS_WINDOW else 0
        first_split = split_of(first_token, SPLIT, CUT)
        count = split_of(tl.maximum(context_len - 1, 0), SPLIT, CUT) + 1 - first_split
        seq_end = tl.sum(tl.where(seqs == seq, split_ends, 0), 0)
        split = first_split + item - (seq_end - count)
        q = tl.load(
            query + seq * query_stride + (heads * query_head_stride)[:, None] + dims[None, :],
            mask=row_mask,
            other=0.0,
        )
        q = as_operand(q, key_cache.dtype.element_ty)
        low = tl.maximum(start_of(split, SPLIT, CUT), first_token) // TILE
        high = (tl.minimum(start_of(split + 1, SPLIT, CUT), context_len) + TILE - 1) // TILE
        positions = tl.zeros([ROWS], dtype=tl.int32) + context_len - 1
        sums, row_max, row_sum = attend(
            q, key_head, value_head, block_table + seq * table_stride, low, high, positions,
            tl.maximum(context_len - 1, 0), score_scale, window, block_stride, slot_stride,
            HEAD_DIM, BLOCK_SIZE, TILE, SPLIT, FIRST, HAS_WINDOW, IS_LARGE_CACHE,
        )  # fmt: skip
        output_row = output + seq * output_stride
        if count == 1:
            result = finish(sums, row_max, row_sum, sinks, heads, is_row, score_scale)
            pointers = output_row + (heads * output_head_stride)[:, None] + dims[None, :]
            tl.store(pointers, result.to(output.dtype.element_ty), mask=row_mask)
        else:
            first_part = (seq * NUM_KV_HEADS + kv_head).to(tl.int64) * max_splits * GROUP_POW2
            part_rows = first_part + (split - first_split) * GROUP_POW2 + rows
            parts = part_sums + part_rows[:, None] * HEAD_DIM_PAD + dims[None, :]
            tl.store(parts, sums, mask=row_mask)
            tl.store(part_norms + part_rows, row_max, mask=is_row)
            tl.store(part_norms + num_parts + part_rows, row_sum, mask=is_row)
            # All threads must have stored before the count goes up: the last program reads it all.
            tl.debug_barrier()
            arrival = arrivals + seq * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == count - 1:
                _merge_splits(
                    part_sums, part_norms, num_parts, first_part, count, sinks, kv_head,
                    output_row, output_head_stride, score_scale,
                    GROUP, GROUP_POW2, HEAD_DIM, HEAD_DIM_PAD,
                )  # fmt: skip
                tl.store(arrival, 0)  # as the next launch expects it


@triton.jit
def _merge_splits(
    part_sums, part_norms, num_parts, first_part, count, sinks, kv_head,
    output_row, output_head_stride, score_scale,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Merge the splits of a sequence and KV head, from first to last."""
    rows = tl.arange(0, GROUP_POW2)
    dims = tl.arange(0, HEAD_DIM_PAD)
    is_row = rows < GROUP
    row_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = kv_head * GROUP + rows
    total, total_max, total_sum = nothing(GROUP_POW2, HEAD_DIM_PAD)
    for split in range(count):
        part_rows = first_part + split * GROUP_POW2 + rows
        pointers = part_sums + part_rows[:, None] * HEAD_DIM_PAD + dims[None, :]
        # .cg: from the L2 cache, where the other programs' stores are.
        sums = tl.load(pointers, mask=row_mask, other=0.0, cache_modifier=".cg")
        row_max = tl.load(part_norms + part_rows, mask=is_row, other=0.0, cache_modifier=".cg")
        row_sum = tl.load(
            part_norms + num_parts + part_rows, mask=is_row, other=0.0, cache_modifier=".cg"
        )
        total, total_max, total_sum = merge(
            total, total_max, total_sum, sums, row_max, row_sum, score_scale
        )
    result = finish(total, total_max, total_sum, sinks, heads, is_row, score_scale)
    pointers = output_row + (heads * output_head_stride)[:, None] + dims[None, :]
    tl.store(pointers, result.to(output_row.dtype.element_ty), mask=row_mask)


def split_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    output: torch.Tensor | None = None,
    first_seq: torch.Tensor | None = None,
    max_seqs: int | None = None,
    sinks: torch.Tensor | None = None,
    tile: PrefillTile | None = None,
    split: int = SPLIT,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Do what `paged_prefill` does, with its arguments. The twin is the same."""
    if not launch.runs_triton(query):
        return paged_prefill_torch(
            query, key_cache, value_cache, block_table, context_lens, query_start_loc,
            scale, window, output, first_seq, sinks,
        )  # fmt: skip
    num_tokens, num_q_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    num_seqs = len(context_lens)
    max_seqs = num_seqs if max_seqs is None else min(max_seqs, num_seqs)
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    head_dim_pad = next_power_of_2(head_dim)
    tile = tile or chunk_tile(head_dim_pad, query.element_size())
    group = num_q_heads // num_kv_heads
    tile_rows = max(tile.rows, next_power_of_2(group))
    query_tokens = tile_rows // group
    num_tiles = num_tokens // query_tokens + max_seqs
    launch.kernel(_split_prefill_kernel, (num_kv_heads, num_tiles))(
        query, key_cache, value_cache, block_table, context_lens, query_start_loc, output,
        first_seq, sinks, num_seqs,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        window or 0,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], block_table.stride(0),
        output.stride(0), output.stride(1),
        NUM_SEQS_PAD=lanes_for(max_seqs),
        GROUP=group,
        QUERY_TOKENS=query_tokens,
        ROWS=tile_rows,
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=head_dim_pad,
        BLOCK_SIZE=block_size,
        TILE=tile.tokens,
        SPLIT=split,
        FIRST=split // NUM_FIRST,
        HAS_WINDOW=bool(window),
        IS_LARGE_CACHE=key_cache.numel() >= 2**31,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_seqs"])
def _split_prefill_kernel(
    query, key_cache, value_cache, block_table, context_lens, query_start_loc, output,
    first_seq, sinks, num_seqs, score_scale, window,
    query_stride, query_head_stride, block_stride, slot_stride, head_stride, table_stride,
    output_stride, output_head_stride,
    NUM_SEQS_PAD: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_LARGE_CACHE: tl.constexpr,
):  # fmt: skip
    # A tile of queries and its sequence are found as in `paged_prefill`.
    kv_head = tl.program_id(0)
    query_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq_ids = tl.arange(0, NUM_SEQS_PAD)
    first = 0
    if first_seq is not None:
        first = tl.load(first_seq)
        query_start_loc += first
        context_lens += first
    is_seq = seq_ids < num_seqs - first
    starts = tl.load(query_start_loc + seq_ids, mask=is_seq, other=0)
    ends = tl.load(query_start_loc + 1 + seq_ids, mask=is_seq, other=0)
    lens = tl.load(context_lens + seq_ids, mask=is_seq, other=0)
    owned = (starts // QUERY_TOKENS + seq_ids <= query_tile) & is_seq
    seq = tl.sum(owned.to(tl.int32), 0) - 1
    query_start = tl.sum(tl.where(seq_ids == seq, starts, 0), 0)
    query_len = tl.sum(tl.where(seq_ids == seq, ends, 0), 0) - query_start
    context_len = tl.sum(tl.where(seq_ids == seq, lens, 0), 0)
    first_token = (query_tile - query_start // QUERY_TOKENS - seq) * QUERY_TOKENS
    if (seq < 0) | (first_token >= query_len):
        return

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    row_tokens = first_token + rows // GROUP
    heads = kv_head * GROUP + rows % GROUP
    is_row = (rows // GROUP < QUERY_TOKENS) & (row_tokens < query_len)
    mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = (query_start + row_tokens).to(tl.int64)
    q = tl.load(
        query + (query_rows * query_stride + heads * query_head_stride)[:, None] + dims[None, :],
        mask=mask,
        other=0.0,
    )
    q = as_operand(q, key_cache.dtype.element_ty)
    first_position = context_len - query_len + first_token
    positions = context_len - query_len + row_tokens
    end = tl.minimum(first_position + QUERY_TOKENS, context_len)
    first_seen = tl.maximum(first_position - window + 1, 0) if HAS_WINDOW else 0
    total, total_max, total_sum = attend(
        q, key_cache + kv_head * head_stride, value_cache + kv_head * head_stride,
        block_table + (first + seq) * table_stride, first_seen // TILE, (end + TILE - 1) // TILE,
        positions, context_len - 1, score_scale, window, block_stride, slot_stride,
        HEAD_DIM, BLOCK_SIZE, TILE, SPLIT, FIRST, HAS_WINDOW, IS_LARGE_CACHE,
    )  # fmt: skip
    result = finish(total, total_max, total_sum, sinks, heads, is_row, score_scale)
    output_rows = query_rows * output_stride + heads * output_head_stride
    tl.store(
        output + output_rows[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=mask
    )


@triton.jit
def split_of(token, SPLIT: tl.constexpr, CUT: tl.constexpr):
    """Return the split of a token, if the first `SPLIT` tokens are cut into splits of `CUT`."""
    return tl.where(token < SPLIT, token // CUT, token // SPLIT + SPLIT // CUT - 1)


@triton.jit
def start_of(split, SPLIT: tl.constexpr, CUT: tl.constexpr):
    """Return the first token of a split."""
    later = split - (SPLIT // CUT - 1)
    return tl.where(later > 0, later * SPLIT, split * CUT)


@triton.jit
def attend(
    q, key_head, value_head, table, low, high, positions, last_token, score_scale, window,
    block_stride, slot_stride,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    FIRST: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_LARGE_CACHE: tl.constexpr,
):  # fmt: skip
    """Return weighted sums of values, the largest score and the sum of weights of each query, over
    the tiles from `low` up to, but not including, `high`. Splits are merged as they end.

    positions: of the queries; each sees the tokens up to its own. last_token: of the context.
    """
    ROWS: tl.constexpr = q.shape[0]
    HEAD_DIM_PAD: tl.constexpr = q.shape[1]
    dims = tl.arange(0, HEAD_DIM_PAD)
    tile_tokens = tl.arange(0, TILE)
    total, total_max, total_sum = nothing(ROWS, HEAD_DIM_PAD)
    sums, row_max, row_sum = nothing(ROWS, HEAD_DIM_PAD)
    # Unsigned, so that dividing by the block size is a shift. Past the end of the context the last
    # token is read again, since it is finite, and an unused slot may hold a NaN.
    last = last_token.to(tl.uint32)
    tokens = tl.minimum((low * TILE + tile_tokens).to(tl.uint32), last)
    blocks = tl.load(table + tokens // BLOCK_SIZE)
    for tile in range(low, high):
        if IS_LARGE_CACHE:
            blocks = blocks.to(tl.int64)
        slots = blocks * block_stride + (tokens % BLOCK_SIZE).to(tl.int32) * slot_stride
        offsets = slots[:, None] + dims[None, :]
        # Block ids are loaded one tile ahead. If a KV load waited for a load in the same
        # iteration, the compiler could not keep several KV tiles in flight.
        tokens = tl.minimum(((tile + 1) * TILE + tile_tokens).to(tl.uint32), last)
        blocks = tl.load(table + tokens // BLOCK_SIZE)
        if HEAD_DIM == HEAD_DIM_PAD:
            keys = tl.load(key_head + offsets)
        else:
            keys = tl.load(key_head + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        begin = tile * TILE
        if (begin % SPLIT == 0) | ((begin < SPLIT) & (begin % FIRST == 0)):
            # The split before has ended. Its sums become 0 below, since `rescale` is 0. This comes
            # before the products, as Triton does not wait for one that is read in an `if` first.
            total, total_max, total_sum = merge(
                total, total_max, total_sum, sums, row_max, row_sum, score_scale
            )
            row_max = tl.full([ROWS], FLOOR, dtype=tl.float32)
            row_sum = tl.zeros([ROWS], dtype=tl.float32)
        columns = begin + tile_tokens
        visible = columns[None, :] <= positions[:, None]
        if HAS_WINDOW:
            visible = visible & (columns[None, :] > positions[:, None] - window)
        scores = tl.where(visible, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp2((row_max - new_max) * score_scale)
        weights = tl.exp2(tl.fma(scores, score_scale, -(new_max * score_scale)[:, None]))
        row_sum = tl.fma(row_sum, rescale, tl.sum(weights, 1))
        row_max = new_max
        if HEAD_DIM == HEAD_DIM_PAD:
            values = tl.load(value_head + offsets)
        else:
            values = tl.load(value_head + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        sums = sums * rescale[:, None]
        sums = tl.dot(weights.to(q.dtype), values.to(q.dtype), sums, input_precision="ieee")
    return merge(total, total_max, total_sum, sums, row_max, row_sum, score_scale)


@triton.jit
def nothing(ROWS: tl.constexpr, HEAD_DIM_PAD: tl.constexpr):
    """Return the sums, the largest score and the sum of weights of no tokens."""
    sums = tl.zeros([ROWS, HEAD_DIM_PAD], dtype=tl.float32)
    # Finite, so that a row stays finite if it sees nothing of a tile.
    return sums, tl.full([ROWS], FLOOR, dtype=tl.float32), tl.zeros([ROWS], dtype=tl.float32)


@triton.jit
def finish(total, total_max, total_sum, sinks, heads, is_row, score_scale):
    """Return the result of all splits. A sink comes last, with a weight of 1 and no value."""
    if sinks is not None:
        sums, _, row_sum = nothing(total.shape[0], total.shape[1])
        sink = load_sinks(sinks, heads, is_row) / score_scale
        total, total_max, total_sum = merge(
            total, total_max, total_sum, sums, sink, row_sum + 1.0, score_scale
        )
    return total / tl.where(total_sum > 0, total_sum, 1.0)[:, None]


@triton.jit
def merge(total, total_max, total_sum, sums, row_max, row_sum, score_scale):
    """Return the sums so far with those of one more split.

    A split of which a query sees nothing changes no bit of its sums. To merge with nothing changes
    no bit of the split's.
    """
    new_max = tl.maximum(total_max, row_max)
    old = tl.exp2((total_max - new_max) * score_scale)
    new = tl.exp2((row_max - new_max) * score_scale)
    total = tl.fma(sums, new[:, None], total * old[:, None])
    return total, new_max, tl.fma(row_sum, new, total_sum * old)
