"""Paged prefill: causal attention of chunks of new tokens over block tables.

Each sequence has `query_len` new tokens, the last ones of its context: a whole prompt, a chunk of
one, or a single token. Their KV is already in the cache. A program takes a tile of query rows -
tokens x the query heads of one KV head, so that the heads of a group share each KV load - and
walks the context from left to right with an online softmax:

                     context ->  0        first query        context_len
    query rows of a tile         |             |                  |
      token 0, heads 0..G-1      |#############|                  |     # full tiles: no mask,
      token 1, heads 0..G-1      |#############|%                 |       the common case
      ...                        |#############|%%%               |     % masked tiles: the
      token n, heads 0..G-1      |#############|%%%%%%            |       causal edge

The tiles of all sequences form one list: those of sequence s begin at number
`query_start_loc[s] // tile + s`. This formula needs no table, and leaves at most one empty tile per
sequence. The longest walks start first, so that the last programs to run are short. The KV heads of
a tile start together, so that neighbours in memory are read at the same time.

It saves the score matrix (never in memory), padding of chunks to one length, and a gather of
the KV blocks into a contiguous tensor. Papers: Dao, FlashAttention-2 (2023); Kwon et al.,
PagedAttention (2023).
"""

from __future__ import annotations

import torch

from .gpu_tiles import prefill_tile
from .launch import PLAIN, Launch
from .tiles import PrefillTile
from .triton_or_twin import lanes_for, next_power_of_2, tl, triton

LOG2_E = 1.4426950408889634
_LOG2_E = tl.constexpr(LOG2_E)


def paged_prefill(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    output: torch.Tensor | None = None,
    tile: PrefillTile | None = None,
    first_seq: torch.Tensor | None = None,
    max_seqs: int | None = None,
    sinks: torch.Tensor | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Compute causal attention of each sequence's chunk of new tokens over its context.

    query: `[num_tokens, num_q_heads, head_dim]`, last dimension contiguous.
    key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, same strides.
    block_table: int32 `[num_seqs, max_blocks]`; context_lens: int32 `[num_seqs]`, chunk included.
    query_start_loc: int32 `[num_seqs + 1]`; the chunk of sequence s is the query rows from
    `query_start_loc[s]` up to `query_start_loc[s + 1]`. Rows outside of all chunks are not written.
    scale: factor of the scores, `head_dim ** -0.5` if None. window: tokens a query sees, itself
    included.
    first_seq: int32 `[1]`; sequences before it (decode rows in a mixed step) are skipped. It is
    read on the device, so that a CUDA graph may hold any mixture. max_seqs: most sequences from
    there on; all, if None.
    sinks: `[num_q_heads]`; for each head one more score, which has no value.
    Returns `[num_tokens, num_q_heads, head_dim]` (`output` if given).
    """
    if not launch.runs_triton(query):
        return paged_prefill_torch(
            query, key_cache, value_cache, block_table, context_lens, query_start_loc,
            scale, window, output, first_seq, sinks,
        )  # fmt: skip
    num_tokens, num_q_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    if key_cache.stride() != value_cache.stride():
        raise ValueError(f"strides differ: {key_cache.stride()}, {value_cache.stride()}")
    num_seqs = len(context_lens)
    max_seqs = num_seqs if max_seqs is None else min(max_seqs, num_seqs)
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    head_dim_pad = next_power_of_2(head_dim)
    tile = tile or prefill_tile(head_dim_pad, key_cache.dtype, query.device)
    group = num_q_heads // num_kv_heads
    tile_rows = max(tile.rows, next_power_of_2(group))
    query_tokens = tile_rows // group
    num_tiles = num_tokens // query_tokens + max_seqs
    launch.kernel(_paged_prefill_kernel, (num_kv_heads, num_tiles))(
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
        HAS_WINDOW=bool(window),
        IS_LARGE_CACHE=key_cache.numel() >= 2**31,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )  # fmt: skip
    return output


@triton.jit(do_not_specialize=["num_seqs"])
def _paged_prefill_kernel(
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
    HAS_WINDOW: tl.constexpr,
    IS_LARGE_CACHE: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0)
    query_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    seq_ids = tl.arange(0, NUM_SEQS_PAD)
    first = 0
    if first_seq is not None:
        first = tl.load(first_seq)
        query_start_loc += first
        context_lens += first
    # Load three vectors together and pick from them: a chain of scalar loads would wait thrice.
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
    row_heads = kv_head * GROUP + rows % GROUP
    row_mask = (rows // GROUP < QUERY_TOKENS) & (row_tokens < query_len)
    mask = row_mask[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = (query_start + row_tokens).to(tl.int64)
    q = tl.load(
        query
        + (query_rows * query_stride + row_heads * query_head_stride)[:, None]
        + dims[None, :],
        mask=mask,
        other=0.0,
    )
    q = as_operand(q, key_cache.dtype.element_ty)
    first_position = context_len - query_len + first_token
    positions = context_len - query_len + row_tokens
    last_position = tl.minimum(first_position + QUERY_TOKENS, context_len) - 1

    accumulator = tl.zeros([ROWS, HEAD_DIM_PAD], dtype=tl.float32)
    # Finite, so that a row stays finite if its first tile is all masked (possible with a window).
    row_max = tl.full([ROWS], -1.0e30, dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    if sinks is not None:
        row_max = load_sinks(sinks, row_heads, row_mask) / score_scale
        row_sum += 1.0
    low = tl.maximum(first_position - window + 1, 0) // TILE if HAS_WINDOW else 0
    first_masked = low if HAS_WINDOW else (first_position + 1) // TILE
    high = last_position // TILE + 1

    table = block_table + (first + seq) * table_stride
    key_head = key_cache + kv_head * head_stride
    value_head = value_cache + kv_head * head_stride
    tile_tokens = tl.arange(0, TILE)
    # Unsigned, so that dividing by the block size is a shift. Past the end of the context the last
    # token is read again, since it is finite, and an unused slot may hold a NaN.
    last_token = (context_len - 1).to(tl.uint32)
    tokens = tl.minimum((low * TILE + tile_tokens).to(tl.uint32), last_token)
    blocks = tl.load(table + tokens // BLOCK_SIZE)
    for tile in range(low, high):
        if IS_LARGE_CACHE:
            blocks = blocks.to(tl.int64)
        slots = blocks * block_stride + (tokens % BLOCK_SIZE).to(tl.int32) * slot_stride
        offsets = slots[:, None] + dims[None, :]
        # Block ids are loaded one tile ahead. If a KV load waited for a load in the same
        # iteration, the compiler could not keep several KV tiles in flight.
        tokens = tl.minimum(((tile + 1) * TILE + tile_tokens).to(tl.uint32), last_token)
        blocks = tl.load(table + tokens // BLOCK_SIZE)

        if HEAD_DIM == HEAD_DIM_PAD:
            keys = tl.load(key_head + offsets)
        else:
            keys = tl.load(key_head + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(keys.to(q.dtype)), input_precision="ieee")
        if tile >= first_masked:
            columns = tile * TILE + tile_tokens
            visible = columns[None, :] <= positions[:, None]
            if HAS_WINDOW:
                visible = visible & (columns[None, :] > positions[:, None] - window)
            scores = tl.where(visible, scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale = tl.exp2((row_max - new_max) * score_scale)
        weights = tl.exp2(scores * score_scale - (new_max * score_scale)[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        if HEAD_DIM == HEAD_DIM_PAD:
            values = tl.load(value_head + offsets)
        else:
            values = tl.load(value_head + offsets, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        accumulator = accumulator * rescale[:, None]
        accumulator = tl.dot(
            weights.to(q.dtype), values.to(q.dtype), accumulator, input_precision="ieee"
        )

    result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    output_rows = query_rows * output_stride + row_heads * output_head_stride
    tl.store(
        output + output_rows[:, None] + dims[None, :], result.to(output.dtype.element_ty), mask=mask
    )


@triton.jit
def load_sinks(sinks, heads, mask):
    """Return the sinks of these heads as scores in log2, like those that attention exponentiates.

    The softmax of a row begins with its sink: the maximum so far, with a weight of 1.
    """
    return tl.load(sinks + heads, mask=mask, other=0.0).to(tl.float32) * _LOG2_E


@triton.jit
def as_operand(query, cache_dtype: tl.constexpr):
    """Return queries in the dtype in which attention multiplies: their own, but fp16 with a cache
    in e4m3. fp16 has all numbers of e4m3, and one instruction converts two of them."""
    if cache_dtype == tl.float8e4nv and query.dtype == tl.bfloat16:
        return query.to(tl.float16)
    else:
        return query


def paged_prefill_torch(
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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Specify `paged_prefill`: gather a sequence's KV, and attend in fp32 at least."""
    if output is None:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    _, block_size, num_kv_heads, _ = key_cache.shape
    wide = torch.promote_types(query.dtype, torch.float32)
    starts, lens = query_start_loc.tolist(), context_lens.tolist()
    for seq, context_len in enumerate(lens):
        if first_seq is not None and seq < int(first_seq):
            continue
        chunk = slice(starts[seq], starts[seq + 1])
        query_len = chunk.stop - chunk.start
        if query_len == 0 or context_len == 0:
            continue
        first_token = 0 if window is None else max(0, context_len - query_len - window + 1)
        tokens = torch.arange(first_token, context_len, device=query.device)
        blocks = block_table[seq, tokens // block_size].long()
        keys = key_cache[blocks, tokens % block_size].to(wide)
        values = value_cache[blocks, tokens % block_size].to(wide)
        # [query_len, num_kv_heads, group, head_dim]: query heads grouped by the KV head they share.
        q = query[chunk].to(wide).unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->hgqk", q, keys) * scale
        positions = torch.arange(context_len - query_len, context_len, device=query.device)
        visible = tokens[None, :] <= positions[:, None]
        if window is not None:
            visible &= tokens[None, :] > positions[:, None] - window
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            column = sinks.to(wide).view(num_kv_heads, -1, 1, 1).expand(-1, -1, query_len, 1)
            scores = torch.cat([scores, column], -1)
        weights = scores.softmax(-1)[..., : len(tokens)]
        output[chunk] = (
            torch.einsum("hgqk,khd->qhgd", weights, values).flatten(1, 2).to(output.dtype)
        )
    return output
