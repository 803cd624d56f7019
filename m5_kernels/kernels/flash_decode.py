"""Paged Flash-Decoding: attention of one new token per sequence over its KV blocks.

A decode step reads the whole KV cache once and computes almost nothing, so its speed is the
memory bandwidth that it keeps busy. One program per sequence and head leaves most of the GPU idle
when sequences are few, or of unequal length. Here the KV tiles of all sequences form one list,
which is cut into equal shares, one per program, even in the middle of a sequence:

    context     |-------- seq 0 ---------|seq1|----------- seq 2 -----------|
    KV tiles    | 0  | 1  | 2  | 3  | 4  | 0  | 0  | 1  | 2  | 3  | 4  | 5  |
    programs    |----- w0 -----|----- w1 -----|----- w2 -----|----- w3 -----|
    each leaves  part of seq 0  rest of seq 0, part of seq 2  rest of seq 2
                                all of seq 1

If a sequence is inside one share, its program writes the result at once. If a sequence was cut,
each of its programs leaves a partial sum with its log-sum-exp. A program leaves at most two, for
its first and its last sequence. The last program of a sequence to finish merges them, always in
program order, so the result doesn't depend on which program finishes first. The kernel computes the
shares from `context_lens`. So the grid is fixed, which a CUDA graph needs, and the work is balanced
for any mix of lengths. Each KV head has its own programs. The query heads that share it are the
rows of one matrix product, so KV is read once. Only if there are few sequences, the query heads of
a KV head are dealt to several sets of programs (`sets_of_kv_head`).

It saves idle multiprocessors (compared with a program per sequence), a second launch (compared with
a separate reduce), and repeated KV reads (compared with a program per query head).
Paper: Dao et al., Flash-Decoding (2023); equal shares: Osama et al., Stream-K (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .gpu_tiles import decode_tile
from .launch import PLAIN, Launch
from .paged_prefill import LOG2_E, as_operand, load_sinks, paged_prefill_torch
from .pdl import wait_for_previous
from .tiles import DecodeTile
from .triton_or_twin import HAS_PTX, next_power_of_2, num_multiprocessors, tl, triton

MIN_ROWS = 16
"""Rows of the smallest matrix product."""
MOST_SETS = 4
"""Most sets of programs that share a KV head."""
FLOOR = tl.constexpr(-1e30)
"""Below every score: the maximum of no scores. With -inf, a difference of two would be NaN."""


@dataclass(frozen=True)
class DecodeWorkspace:
    """Memory in which the programs of one launch exchange data. Kernels on one stream can share it.

    partial_output: fp32 `[2 * num_programs, num_heads, head_dim_pad]`, where num_heads is the
    number of query heads of a KV head, rounded up to a power of two. partial_lse: fp32
    `[2 * num_programs, num_heads]`, in log2. arrivals: int32
    `[MOST_SETS * max_num_seqs * num_kv_heads]`, zero between launches.
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
        """Return a workspace for any step of up to `max_num_seqs` sequences, some MiB."""
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
            arrivals=torch.zeros(
                MOST_SETS * max_num_seqs * num_kv_heads, dtype=torch.int32, device=device
            ),
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
    sinks: torch.Tensor | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Compute attention of each sequence's newest token over its whole context.

    query: `[num_seqs, num_q_heads, head_dim]`, last dimension contiguous.
    key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, same strides.
    block_table: int32 `[num_seqs, max_blocks]`; context_lens: int32 `[num_seqs]`, the newest token
    included; 0 marks a padding row, which gets zeros and whose block table may hold anything.
    scale: factor of the scores, `head_dim ** -0.5` if None. window: tokens a query sees, itself
    included.
    sinks: `[num_q_heads]`; for each head one more score, which has no value.
    workspace: reused between launches, and required inside a CUDA graph; None allocates one.
    The kernel may start before the previous one ends. That one must not write context_lens or
    block_table.
    Returns `[num_seqs, num_q_heads, head_dim]` (`output` if given).
    """
    if not launch.runs_triton(query):
        return flash_decode_torch(
            query, key_cache, value_cache, block_table, context_lens, scale, window, output, sinks
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
    if MOST_SETS * num_seqs * num_kv_heads > workspace.arrivals.numel():
        limit = workspace.arrivals.numel() // (MOST_SETS * num_kv_heads)
        raise ValueError(f"{num_seqs} sequences, but the workspace holds {limit}")
    sets = sets_of_kv_head(num_seqs, num_q_heads, num_kv_heads)
    num_sets = num_kv_heads * sets
    tile, group = workspace.tile, num_q_heads // num_sets
    group_pow2 = next_power_of_2(group)
    programs_per_set = max(1, workspace.programs_per_head // sets)
    launch.kernel(_flash_decode_kernel, (programs_per_set * num_sets,))(
        query, key_cache, value_cache, block_table, context_lens, output,
        workspace.partial_output, workspace.partial_lse, workspace.arrivals, sinks,
        num_seqs,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        window or 0,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], block_table.stride(0),
        output.stride(0), output.stride(1),
        NUM_SEQS_PAD=max(16, next_power_of_2(num_seqs)),  # small numbers share one kernel
        NUM_SETS=num_sets,
        SETS_OF_KV_HEAD=sets,
        GROUP=group,
        GROUP_POW2=group_pow2,
        ROWS=max(MIN_ROWS, group_pow2),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=workspace.partial_output.shape[2],
        BLOCK_SIZE=block_size,
        TILE=tile.tokens,
        IN_PAIRS=can_read_pairs(value_cache, query),
        HAS_WINDOW=bool(window),
        IS_LARGE_CACHE=key_cache.numel() >= 2**31,
        HAS_MANY_TILES=has_many_tiles(block_table, block_size, workspace),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch.pdl_options(),
    )  # fmt: skip
    return output


def sets_of_kv_head(num_seqs: int, num_q_heads: int, num_kv_heads: int) -> int:
    """Return how many sets of programs share a KV head, each with as many of its query heads.

    If there are few sequences, their KV comes from the L2 cache when it is read again, and the
    multiprocessors are not all busy. What takes long is merging, and a set merges fewer heads. A
    set has two heads at least. The limits were measured on an H200.
    """
    group, pairs = num_q_heads // num_kv_heads, num_seqs * num_kv_heads
    sets = MOST_SETS if pairs <= 16 else 2 if pairs <= 64 else 1
    while sets > 1 and (group % sets or group // sets < 2):
        sets //= 2
    return sets


def has_many_tiles(block_table: torch.Tensor, block_size: int, workspace: DecodeWorkspace) -> bool:
    """Return whether the numbers that shares are computed from need 64 bits. Dividing those takes
    many instructions."""
    num_seqs, max_blocks = block_table.shape
    most_tiles = num_seqs * (max_blocks * block_size // workspace.tile.tokens + 1)
    return most_tiles * (workspace.programs_per_head + 1) >= 2**31


def can_read_pairs(cache: torch.Tensor, query: torch.Tensor) -> bool:
    """Return whether `halves_of_pairs` takes what is in a cache, and queries multiply in fp16, as
    it returns numbers (`as_operand`)."""
    size = cache.shape[-1]
    is_fp16 = cache.dtype == torch.float8_e4m3fn and query.element_size() == 2
    return bool(HAS_PTX) and is_fp16 and size == next_power_of_2(size)


@triton.jit(do_not_specialize=["num_seqs"])
def _flash_decode_kernel(
    query, key_cache, value_cache, block_table, context_lens, output,
    partial_output, partial_lse, arrivals, sinks,
    num_seqs, score_scale, window,
    query_stride, query_head_stride, block_stride, slot_stride, head_stride, table_stride,
    output_stride, output_head_stride,
    NUM_SEQS_PAD: tl.constexpr,
    NUM_SETS: tl.constexpr,
    SETS_OF_KV_HEAD: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    IN_PAIRS: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_LARGE_CACHE: tl.constexpr,
    HAS_MANY_TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    # The programs of a set share the tiles of its KV head; `worker` is the number of this program
    # among them.
    head_set = tl.program_id(0) % NUM_SETS
    worker = tl.program_id(0) // NUM_SETS
    num_workers = tl.num_programs(0) // NUM_SETS
    kv_head = head_set // SETS_OF_KV_HEAD

    # The tiles of all sequences are numbered one after the other. This program's share is the tiles
    # from share_start up to, but not including, share_end; see `start_of_share`.
    seqs = tl.arange(0, NUM_SEQS_PAD)
    is_seq = seqs < num_seqs
    lens = tl.load(context_lens + seqs, mask=is_seq, other=0)
    first_tiles = tl.maximum(lens - window, 0) // TILE if HAS_WINDOW else tl.zeros_like(lens)
    # A padding row counts one tile, so that a program owns it and writes its zeros.
    tile_counts = tl.maximum((lens + TILE - 1) // TILE - first_tiles, 1)
    tile_counts = tl.where(is_seq, tile_counts, 0)
    seq_ends = tl.cumsum(tile_counts, 0)
    total_tiles = tl.sum(tile_counts, 0)
    if HAS_MANY_TILES:
        total_tiles = total_tiles.to(tl.int64)
    num_workers = tl.minimum(num_workers, total_tiles)
    if worker >= num_workers:
        return  # without waiting for the previous kernel, so that its registers are free at once
    share_start = start_of_share(worker, num_workers, total_tiles)
    share_end = start_of_share(worker + 1, num_workers, total_tiles)

    # The share's sequences: first_seq has its first tile, last_seq its last one.
    first_seq = tl.sum(((seq_ends <= share_start) & is_seq).to(tl.int32), 0)
    last_seq = tl.sum(((seq_ends < share_end) & is_seq).to(tl.int32), 0)
    seq_start = tl.sum(tl.where(seqs < first_seq, tile_counts, 0), 0).to(total_tiles.dtype)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    tile_tokens = tl.arange(0, TILE)
    is_row = rows < GROUP
    row_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    heads = (head_set * GROUP + rows)[:, None]
    cache_dims = kv_head * head_stride + dims
    pairs = kv_head * head_stride // 2 + tl.arange(0, HEAD_DIM_PAD // 2)
    seq = first_seq
    while seq <= last_seq:
        # The sequence has the tiles from seq_start to seq_end. This program computes the ones from
        # own_start to own_end.
        context_len = tl.load(context_lens + seq)
        first_tile = tl.maximum(context_len - window, 0) // TILE if HAS_WINDOW else 0
        num_tiles = (context_len + TILE - 1) // TILE - first_tile
        seq_end = seq_start + tl.maximum(num_tiles, 1)
        own_start = tl.maximum(share_start, seq_start)
        own_end = tl.minimum(share_end, seq_end)
        first_worker = worker_of(seq_start, num_workers, total_tiles)
        last_worker = worker_of(seq_end - 1, num_workers, total_tiles)
        # A program has two slots for partial sums: slot 0 for the sequence in which its share
        # starts, slot 1 for its last sequence, if that is another one. So this sequence is in slot
        # 0 of all its programs, except perhaps the first one, whose share may start in an earlier
        # sequence.
        first_start = start_of_share(first_worker, num_workers, total_tiles)
        first_slot = (first_start != seq_start).to(tl.int32)

        if IN_PAIRS:
            even_dims = tl.zeros([ROWS, HEAD_DIM_PAD // 2], dtype=tl.float32)
            odd_dims = tl.zeros([ROWS, HEAD_DIM_PAD // 2], dtype=tl.float32)
        else:
            accumulator = tl.zeros([ROWS, HEAD_DIM_PAD], dtype=tl.float32)
        row_max = tl.full([ROWS], FLOOR, dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        if sinks is not None:  # they count once, with the first tile of the sequence
            row_max = load_sinks(sinks, head_set * GROUP + rows, is_row)
            row_sum += tl.where(own_start == seq_start, 1.0, 0.0)
        # The same tiles, now numbered within the context.
        low = (own_start - seq_start).to(tl.int32) + first_tile
        high = tl.where(context_len > 0, (own_end - seq_start).to(tl.int32) + first_tile, 0)
        table = block_table + seq * table_stride
        # Unsigned, so that dividing by the block size is a shift. Past the end of the context the
        # last token is read again, since it is finite, and an unused slot may hold a NaN.
        last_token = tl.maximum(context_len - 1, 0).to(tl.uint32)
        tokens = tl.minimum((low * TILE + tile_tokens).to(tl.uint32), last_token)
        blocks = tl.load(table + tokens // BLOCK_SIZE)
        # Wait for queries, and the newest keys and values. The wait must stay outside of a `for`
        # that Triton pipelines: it may move loads of the loop before the wait (Triton's #11905).
        wait_for_previous(PDL)
        q = tl.load(
            query + seq * query_stride + heads * query_head_stride + dims[None, :],
            mask=row_mask,
            other=0.0,
        )
        q = as_operand(q, key_cache.dtype.element_ty)
        value_pairs = value_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        for tile in range(low, high):
            if IS_LARGE_CACHE:
                blocks = blocks.to(tl.int64)
            slots = blocks * block_stride + (tokens % BLOCK_SIZE).to(tl.int32) * slot_stride
            # Block ids are loaded one tile ahead. If a KV load waited for a load in the same
            # iteration, the compiler could not keep several KV tiles in flight.
            tokens = tl.minimum(((tile + 1) * TILE + tile_tokens).to(tl.uint32), last_token)
            blocks = tl.load(table + tokens // BLOCK_SIZE)
            pointers = slots[:, None] + cache_dims[None, :]
            if HEAD_DIM == HEAD_DIM_PAD:
                keys = tl.load(key_cache + pointers)
            else:
                keys = tl.load(key_cache + pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee") * score_scale
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
            if IN_PAIRS:
                pointers = value_pairs + (slots // 2)[:, None] + pairs[None, :]
                even, odd = halves_of_pairs(tl.load(pointers))
                even_dims = tl.dot(weights.to(q.dtype), even, even_dims * rescale[:, None])
                odd_dims = tl.dot(weights.to(q.dtype), odd, odd_dims * rescale[:, None])
            else:
                if HEAD_DIM == HEAD_DIM_PAD:
                    values = tl.load(value_cache + pointers)
                else:
                    mask = (dims < HEAD_DIM)[None, :]
                    values = tl.load(value_cache + pointers, mask=mask, other=0.0)
                accumulator = accumulator * rescale[:, None]
                accumulator = tl.dot(
                    weights.to(q.dtype), values.to(q.dtype), accumulator, input_precision="ieee"
                )
        if IN_PAIRS:
            accumulator = tl.reshape(tl.join(even_dims, odd_dims), [ROWS, HEAD_DIM_PAD])
        result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]

        output_pointers = output + seq * output_stride + heads * output_head_stride + dims[None, :]
        if first_worker == last_worker:
            tl.store(output_pointers, result.to(output.dtype.element_ty), mask=row_mask)
        else:
            slot = 2 * tl.program_id(0) + (own_start != share_start).to(tl.int32)
            partial_rows = slot * GROUP_POW2 + rows
            partials = partial_output + partial_rows[:, None] * HEAD_DIM_PAD + dims[None, :]
            tl.store(partials, result, mask=row_mask)
            tl.store(partial_lse + partial_rows, row_max + tl.log2(row_sum), mask=is_row)
            # All threads must have stored before the count goes up: the last program reads it all.
            tl.debug_barrier()
            arrival = arrivals + seq * NUM_SETS + head_set
            if tl.atomic_add(arrival, 1, sem="acq_rel") == last_worker - first_worker:
                merge_parts(
                    partial_output, partial_lse, first_worker, last_worker, first_slot, head_set,
                    output + seq * output_stride, output_head_stride,
                    NUM_SETS, GROUP, GROUP_POW2, HEAD_DIM, HEAD_DIM_PAD,
                )  # fmt: skip
                tl.store(arrival, 0)  # as the next launch expects it
        seq_start = seq_end
        seq += 1


@triton.jit
def halves_of_pairs(pairs):
    """Return the first and the second e4m3 of each pair in 16 bits, in fp16.

    The rows of a product's right side are its sum's terms. With bytes, the instruction that brings
    them from shared memory in the order of the tensor core is missing; with 16 bits there is one.
    """
    return tl.inline_asm_elementwise(
        """
        {
        .reg .b32 bytes;
        .reg .b16 two, none;
        prmt.b32 bytes, $2, 0, 0x4420;
        mov.b32 {two, none}, bytes;
        cvt.rn.f16x2.e4m3x2 $0, two;
        prmt.b32 bytes, $2, 0, 0x4431;
        mov.b32 {two, none}, bytes;
        cvt.rn.f16x2.e4m3x2 $1, two;
        }
        """,
        "=r,=r,r",
        [pairs],
        dtype=(tl.float16, tl.float16),
        is_pure=True,
        pack=2,
    )


@triton.jit
def start_of_share(worker, num_workers, total_tiles):
    """Return the first tile of a program's share, by its number among those of all sequences.

    tile       | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 |     total_tiles = 10
    sequence   |         0         | 1 |       2       |
    worker     |     0     |     1     |       2       |     num_workers = 3
    """
    return worker * total_tiles // num_workers


@triton.jit
def worker_of(tile, num_workers, total_tiles):
    """Return the program that has a tile in its share: the last one that starts at or before the
    tile.

    This is `worker * total_tiles // num_workers <= tile`, solved for the worker.
    """
    return ((tile + 1) * num_workers - 1) // total_tiles


@triton.jit
def merge_parts(
    partial_output, partial_lse, first_worker, last_worker, first_slot, head_set,
    output, output_head_stride,
    NUM_SETS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of a sequence and set, weighted by log-sum-exp, in program order."""
    # Load many parts together: one after another, each would cost a trip to the L2 cache.
    PARTS: tl.constexpr = 32 // GROUP_POW2 if GROUP_POW2 < 16 else 2
    rows = tl.arange(0, GROUP_POW2)
    dims = tl.arange(0, HEAD_DIM_PAD)
    row_mask = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    pointers = output + (head_set * GROUP + rows)[:, None] * output_head_stride + dims[None, :]
    accumulator = tl.zeros([GROUP_POW2, HEAD_DIM_PAD], dtype=tl.float32)
    row_max = tl.full([GROUP_POW2], FLOOR, dtype=tl.float32)
    row_sum = tl.zeros([GROUP_POW2], dtype=tl.float32)
    for base in range(first_worker, last_worker + 1, PARTS):
        workers = base + tl.arange(0, PARTS)
        slots = 2 * (workers * NUM_SETS + head_set)
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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specify `flash_decode`: it is a prefill whose chunks have one token each."""
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    output[context_lens == 0] = 0
    starts = torch.arange(len(query) + 1, dtype=torch.int32, device=query.device)
    return paged_prefill_torch(
        query,
        key_cache,
        value_cache,
        block_table,
        context_lens,
        starts,
        scale,
        window,
        output,
        sinks=sinks,
    )
