"""Paged Flash-Decoding: attention of one new token per sequence over its KV blocks.

A decode step reads the whole KV cache once and computes almost nothing, so its speed is the
memory bandwidth that it keeps busy. One program per sequence and head leaves most of the GPU idle
when sequences are few, or unequal. Here all KV tiles of all sequences are laid end to end and cut
into equal shares, one per program, wherever the cuts fall:

    context     |-------- seq 0 ---------|seq1|----------- seq 2 -----------|
    KV tiles    | 0  | 1  | 2  | 3  | 4  | 0  | 0  | 1  | 2  | 3  | 4  | 5  |
    programs    |----- w0 -----|----- w1 -----|----- w2 -----|----- w3 -----|
    each leaves  part of seq 0  rest of seq 0, part of seq 2  rest of seq 2
                                all of seq 1

A sequence inside one share is written at once. A sequence that was cut is left as partial sums
with their log-sum-exp (at most two per program: its first and its last sequence), and the last
of its programs to arrive merges them, always in program order, so that the result doesn't depend on
the order of arrival. Shares come from `context_lens` inside the kernel: the grid is fixed, which
is what a CUDA graph needs, and any mix of lengths is balanced. Each KV head has its own set of
programs; the query heads that share it are the rows of one matrix product, so KV is read once.

It saves: idle multiprocessors (against a program per sequence), a second launch (against a
separate reduce), and repeated KV reads (against a program per query head).
Paper: Dao et al., Flash-Decoding (2023); equal shares: Osama et al., Stream-K (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .backend import next_power_of_2, num_multiprocessors, runs_triton, tl, triton
from .early_start import launch_options, wait_for_previous
from .paged_prefill import LOG2_E, paged_prefill_torch
from .tiles import DecodeTile, decode_tile

MIN_ROWS = 16
"""Rows of the smallest matrix product."""
FLOOR = tl.constexpr(-1e30)
"""Below every score: the maximum of nothing, as a difference of infinities would be no number."""


@dataclass(frozen=True)
class DecodeWorkspace:
    """Data that the programs of one launch exchange. Kernels on one stream can share it.

    partial_output: fp32 `[2 * num_programs, num_heads, head_dim_pad]`, num_heads being the query
    heads of a KV head, as a power of two; partial_lse: fp32 `[2 * num_programs, num_heads]`, in
    log2; arrivals: int32 `[max_num_seqs * num_kv_heads]`, zero between launches.
    """

    partial_output: torch.Tensor
    partial_lse: torch.Tensor
    arrivals: torch.Tensor
    programs_per_head: int
    tile: DecodeTile

    @classmethod
    def allocate(
        cls,
        max_num_seqs: int,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        tile: DecodeTile | None = None,
    ) -> DecodeWorkspace:
        """Room for any step of up to `max_num_seqs` sequences; 10 MiB at most."""
        device = torch.device(device)
        head_dim_pad = next_power_of_2(head_dim)
        tile = tile or decode_tile(head_dim_pad, dtype, device)
        slots = num_multiprocessors(device) * tile.programs_per_sm
        programs_per_head = max(1, slots // num_kv_heads)
        num_partials = 2 * programs_per_head * num_kv_heads
        num_rows = next_power_of_2(num_q_heads // num_kv_heads)
        return cls(
            partial_output=torch.empty(num_partials, num_rows, head_dim_pad, device=device),
            partial_lse=torch.empty(num_partials, num_rows, device=device),
            arrivals=torch.zeros(max_num_seqs * num_kv_heads, dtype=torch.int32, device=device),
            programs_per_head=programs_per_head,
            tile=tile,
        )


def flash_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    output: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
) -> torch.Tensor:
    """Attention of each sequence's newest token over its whole context.

    query: `[num_seqs, num_q_heads, head_dim]`, last dimension contiguous.
    key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, same strides.
    block_table: int32 `[num_seqs, max_blocks]`; context_lens: int32 `[num_seqs]`, the newest token
    included; 0 marks a padding row, which gets zeros whatever its block table holds.
    scale: of the scores, `head_dim ** -0.5` if None. window: tokens a query sees, itself included.
    workspace: reused between launches, and required inside a CUDA graph; None allocates one.
    It may start before the previous kernel ends, which wrote neither context_lens nor block_table.
    Returns `[num_seqs, num_q_heads, head_dim]` (`output` if given).
    """
    if not runs_triton(query):
        return flash_decode_torch(
            query, key_cache, value_cache, block_table, context_lens, scale, window, output
        )
    num_seqs, num_q_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if key_cache.stride() != value_cache.stride():
        raise ValueError(f"strides differ: {key_cache.stride()}, {value_cache.stride()}")
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if workspace is None:
        workspace = DecodeWorkspace.allocate(
            num_seqs, num_q_heads, num_kv_heads, head_dim, key_cache.dtype, query.device,
        )  # fmt: skip
    if num_seqs * num_kv_heads > workspace.arrivals.numel():
        limit = workspace.arrivals.numel() // num_kv_heads
        raise ValueError(f"{num_seqs} sequences, but the workspace holds {limit}")
    tile, group = workspace.tile, num_q_heads // num_kv_heads
    group_pow2 = next_power_of_2(group)
    _flash_decode_kernel[(workspace.programs_per_head * num_kv_heads,)](
        query, key_cache, value_cache, block_table, context_lens, output,
        workspace.partial_output, workspace.partial_lse, workspace.arrivals,
        num_seqs,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        window or 0,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], block_table.stride(0),
        output.stride(0), output.stride(1),
        NUM_SEQS_PAD=max(16, next_power_of_2(num_seqs)),  # a kernel less for each small number
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_POW2=group_pow2,
        ROWS=max(MIN_ROWS, group_pow2),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=workspace.partial_output.shape[2],
        BLOCK_SIZE=block_size,
        TILE=tile.tokens,
        HAS_WINDOW=bool(window),
        IS_LARGE_CACHE=key_cache.numel() >= 2**31,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(),
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_seqs"])
def _flash_decode_kernel(
    query, key_cache, value_cache, block_table, context_lens, output,
    partial_output, partial_lse, arrivals,
    num_seqs, score_scale, window,
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
    HAS_WINDOW: tl.constexpr,
    IS_LARGE_CACHE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    worker = tl.program_id(0) // NUM_KV_HEADS
    num_workers = tl.num_programs(0) // NUM_KV_HEADS

    # The share of this program: tiles [share_start, share_end) of all sequences laid end to end.
    seq_ids = tl.arange(0, NUM_SEQS_PAD)
    lens = tl.load(context_lens + seq_ids, mask=seq_ids < num_seqs, other=0)
    first_tiles = tl.maximum(lens - window, 0) // TILE if HAS_WINDOW else tl.zeros_like(lens)
    # A padding row counts one tile, so that somebody owns it and writes its zeros.
    counts = tl.maximum((lens + TILE - 1) // TILE - first_tiles, 1)
    counts = tl.where(seq_ids < num_seqs, counts, 0)
    ends = tl.cumsum(counts, 0)
    total = tl.sum(counts, 0).to(tl.int64)
    num_workers = tl.minimum(num_workers, total)
    if worker >= num_workers:
        return  # others wait, and this one would keep its registers until then
    share_start = worker * total // num_workers
    share_end = (worker + 1) * total // num_workers
    seq = tl.sum(((ends <= share_start) & (seq_ids < num_seqs)).to(tl.int32), 0)
    last_seq = tl.sum(((ends < share_end) & (seq_ids < num_seqs)).to(tl.int32), 0)
    seq_start = tl.sum(tl.where(seq_ids < seq, counts, 0), 0).to(tl.int64)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    tile_tokens = tl.arange(0, TILE)
    is_row = rows < GROUP
    row_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (kv_head * GROUP + rows)[:, None]
    cache_dims = kv_head * head_stride + dims
    seq_id = seq
    while seq_id <= last_seq:
        context_len = tl.load(context_lens + seq_id)
        first_tile = tl.maximum(context_len - window, 0) // TILE if HAS_WINDOW else 0
        num_tiles = (context_len + TILE - 1) // TILE - first_tile
        seq_end = seq_start + tl.maximum(num_tiles, 1)
        begin = tl.maximum(share_start, seq_start)
        end = tl.minimum(share_end, seq_end)
        first_worker = ((seq_start + 1) * num_workers - 1) // total
        last_worker = (seq_end * num_workers - 1) // total
        # Slot 0 of a program holds the sequence its share begins in, slot 1 the last one.
        first_slot = (first_worker * total // num_workers != seq_start).to(tl.int32)

        accumulator = tl.zeros([ROWS, HEAD_DIM_PAD], dtype=tl.float32)
        row_max = tl.full([ROWS], FLOOR, dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        low = (begin - seq_start).to(tl.int32) + first_tile
        high = tl.where(context_len > 0, (end - seq_start).to(tl.int32) + first_tile, 0)
        table = block_table + seq_id * table_stride
        # Unsigned, so that dividing by the block size is a shift. Past the end of the context the
        # last token is read again: unlike what lies in the unused slots, it is surely finite.
        last_token = tl.maximum(context_len - 1, 0).to(tl.uint32)
        tokens = tl.minimum((low * TILE + tile_tokens).to(tl.uint32), last_token)
        blocks = tl.load(table + tokens // BLOCK_SIZE)
        # For queries, and the newest keys and values. It must stay out of a `for` that Triton
        # pipelines, which may bring the loop's loads in front of a wait in it (Triton's #11905).
        wait_for_previous(PDL)
        q = tl.load(
            query + seq_id * query_stride + heads * query_head_stride + dims[None, :],
            mask=row_mask,
            other=0.0,
        )
        for tile in range(low, high):
            if IS_LARGE_CACHE:
                blocks = blocks.to(tl.int64)
            slots = blocks * block_stride + (tokens % BLOCK_SIZE).to(tl.int32) * slot_stride
            # Block ids come one tile ahead: as a load that waits for a load in the same iteration,
            # they would stop the compiler from keeping several KV tiles in flight.
            tokens = tl.minimum(((tile + 1) * TILE + tile_tokens).to(tl.uint32), last_token)
            blocks = tl.load(table + tokens // BLOCK_SIZE)
            pointers = slots[:, None] + cache_dims[None, :]
            if HEAD_DIM == HEAD_DIM_PAD:
                keys = tl.load(key_cache + pointers)
            else:
                keys = tl.load(key_cache + pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * score_scale
            columns = (tile * TILE + tile_tokens)[None, :]
            visible = columns < context_len
            if HAS_WINDOW:
                visible = visible & (columns >= context_len - window)
            scores = tl.where(visible, scores, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, 1))
            rescale = tl.exp2(row_max - new_max)
            weights = tl.exp2(scores - new_max[:, None])
            row_sum = row_sum * rescale + tl.sum(weights, 1)
            row_max = new_max
            if HEAD_DIM == HEAD_DIM_PAD:
                values = tl.load(value_cache + pointers)
            else:
                values = tl.load(value_cache + pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            accumulator = accumulator * rescale[:, None]
            accumulator = tl.dot(
                weights.to(values.dtype), values, accumulator, input_precision="ieee"
            )
        result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]

        output_pointers = (
            output + seq_id * output_stride + heads * output_head_stride + dims[None, :]
        )
        if first_worker == last_worker:
            tl.store(output_pointers, result.to(output.dtype.element_ty), mask=row_mask)
        else:
            slot = 2 * tl.program_id(0) + (begin != share_start).to(tl.int32)
            partial_rows = slot * GROUP_POW2 + rows
            partials = partial_output + partial_rows[:, None] * HEAD_DIM_PAD + dims[None, :]
            tl.store(partials, result, mask=row_mask)
            tl.store(partial_lse + partial_rows, row_max + tl.log2(row_sum), mask=is_row)
            # Everybody's stores before the count goes up: the last to arrive reads them all.
            tl.debug_barrier()
            arrival = arrivals + seq_id * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == last_worker - first_worker:
                merge_parts(
                    partial_output, partial_lse, first_worker, last_worker, first_slot, kv_head,
                    output + seq_id * output_stride, output_head_stride,
                    NUM_KV_HEADS, GROUP, GROUP_POW2, HEAD_DIM, HEAD_DIM_PAD,
                )  # fmt: skip
                tl.store(arrival, 0)  # as the next launch expects it
        seq_start = seq_end
        seq_id += 1


@triton.jit
def merge_parts(
    partial_output, partial_lse, first_worker, last_worker, first_slot, kv_head,
    output, output_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Weigh the partial sums of a sequence and KV head by their log-sum-exp, in program order."""
    # Many parts are loaded together: one after another, each would cost a trip to the L2 cache.
    PARTS: tl.constexpr = 32 // GROUP_POW2 if GROUP_POW2 < 16 else 2
    rows = tl.arange(0, GROUP_POW2)
    dims = tl.arange(0, HEAD_DIM_PAD)
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = output + (kv_head * GROUP + rows)[:, None] * output_head_stride + dims[None, :]
    accumulator = tl.zeros([GROUP_POW2, HEAD_DIM_PAD], dtype=tl.float32)
    row_max = tl.full([GROUP_POW2], FLOOR, dtype=tl.float32)
    row_sum = tl.zeros([GROUP_POW2], dtype=tl.float32)
    for base in range(first_worker, last_worker + 1, PARTS):
        workers = base + tl.arange(0, PARTS)
        slots = 2 * (workers * NUM_KV_HEADS + kv_head)
        slots += tl.where(workers == first_worker, first_slot, 0)
        partial_rows = slots[:, None] * GROUP_POW2 + rows[None, :]
        mask = (workers <= last_worker)[:, None] & (rows < GROUP)[None, :]
        # .cg: from the L2 cache, where the other programs' stores are.
        lse = tl.load(partial_lse + partial_rows, mask, other=-float("inf"), cache_modifier=".cg")
        parts = tl.load(
            partial_output + partial_rows[:, :, None] * HEAD_DIM_PAD + dims[None, None, :],
            mask[:, :, None] & row_mask[None, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        rescale = tl.exp2(row_max - new_max)
        weights = tl.exp2(lse - new_max[None, :])
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        accumulator = accumulator * rescale[:, None] + tl.sum(parts * weights[:, :, None], 0)
        row_max = new_max
    result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    tl.store(pointers, result.to(output.dtype.element_ty), mask=row_mask)


def flash_decode_torch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    output: torch.Tensor | None = None,
) -> torch.Tensor:
    """The specification of `flash_decode`: a prefill whose chunks hold one token each."""
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    output[context_lens == 0] = 0
    starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    return paged_prefill_torch(
        query, key_cache, value_cache, block_table, context_lens, starts, scale, window, output
    )
