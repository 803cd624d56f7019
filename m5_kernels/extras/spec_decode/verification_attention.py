"""Attention of a step with draft tokens: a request's positions attend together, if that pays off.

The smallest product of a tensor core has 16 rows, and fewer query heads share a KV head. So there
is room for the query heads of draft tokens. As many positions of a request as there is room for
attend together, each to the tokens before it and itself. Keys and values are read once for all of
them. The rest is as in `kernels.flash_decode`, with its shares and its merge. Here tiles belong to
groups of positions.
"""

from __future__ import annotations

import torch

from m5_kernels.decoder.attention import (
    Attention,
    AttentionBackend,
    AttentionLayer,
    AttentionShape,
)
from m5_kernels.kernels.flash_decode import (
    FLOOR,
    MIN_ROWS,
    DecodeWorkspace,
    flash_decode_torch,
    has_many_tiles,
    merge_parts,
    start_of_share,
    worker_of,
)
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.paged_prefill import LOG2_E, as_operand, load_sinks
from m5_kernels.kernels.pdl import wait_for_previous
from m5_kernels.kernels.step_metadata import StepMetadata
from m5_kernels.kernels.triton_or_twin import next_power_of_2, tl, triton

MANY_POSITIONS = 32
"""From so many positions on, a request's draft tokens attend together. With fewer, each request is
cut into more parts, and merging the parts of several positions takes longer than reading keys and
values again."""


def attend_drafts(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    offsets: torch.Tensor,
    scale: float | None = None,
    window: int | None = None,
    output: torch.Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    sinks: torch.Tensor | None = None,
    launch: Launch = PLAIN,
) -> torch.Tensor:
    """Do what `flash_decode` does, if some sequences are draft tokens. The twin is the same.

    offsets: int32 `[num_seqs]`: 0 for a request's own position. 1, 2 ... for its draft tokens,
    which follow it. Their contexts are as many tokens longer, or they are padding. workspace: from
    `verification_workspace`.
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
        workspace = verification_workspace(
            num_seqs, num_q_heads, num_kv_heads, head_dim, key_cache.dtype, query.device
        )
    if num_seqs * num_kv_heads > workspace.arrivals.numel():
        limit = workspace.arrivals.numel() // num_kv_heads
        raise ValueError(f"{num_seqs} sequences, but the workspace holds {limit}")
    tile, group = workspace.tile, num_q_heads // num_kv_heads
    group_pow2 = next_power_of_2(group)
    launch.kernel(_attend_drafts_kernel, (workspace.programs_per_head * num_kv_heads,))(
        query, key_cache, value_cache, block_table, context_lens, output,
        workspace.partial_output, workspace.partial_lse, workspace.arrivals, offsets, sinks,
        num_seqs,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        window or 0,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], block_table.stride(0),
        output.stride(0), output.stride(1),
        NUM_SEQS_PAD=max(16, next_power_of_2(num_seqs)),  # small numbers share one kernel
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        GROUP_POW2=group_pow2,
        PLACES=workspace.partial_output.shape[1] // group_pow2,
        ROWS=max(MIN_ROWS, group_pow2),
        HEAD_DIM=head_dim,
        HEAD_DIM_PAD=workspace.partial_output.shape[2],
        BLOCK_SIZE=block_size,
        TILE=tile.tokens,
        HAS_WINDOW=bool(window),
        IS_LARGE_CACHE=key_cache.numel() >= 2**31,
        HAS_MANY_TILES=has_many_tiles(block_table, block_size, workspace),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch.pdl_options(),
    )  # fmt: skip
    return output


def verification_workspace(
    max_num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeWorkspace:
    """Return a workspace with as many rows as the smallest product, for several positions."""
    num_rows = max(MIN_ROWS, next_power_of_2(num_q_heads // num_kv_heads))
    return DecodeWorkspace.allocate(
        max_num_seqs, num_kv_heads * num_rows, num_kv_heads, head_dim, dtype, device
    )


class VerificationAttention:
    """Attends in steps with draft tokens, and passes small steps to the attention of other steps.

    Args:
        plain: that attention, for which each position is a sequence of its own. If it is not the
            lesson's, it gets all steps: its sums may be in another order.
        max_positions: most positions of a step.
        offsets: int32 `[max_positions]`: 0, or the number of the draft token, for each position.
    """

    def __init__(
        self,
        plain: AttentionBackend,
        shape: AttentionShape,
        max_positions: int,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.plain, self.offsets = plain, offsets
        self.workspace: DecodeWorkspace | None = None
        self.attends_together = isinstance(plain, Attention)
        if device.type == "cuda" and self.attends_together:
            self.workspace = verification_workspace(max_positions, *shape, dtype, device)

    def prepare(self, metadata: StepMetadata, launch: Launch) -> StepMetadata:
        """Return the metadata unchanged: a step with draft tokens has no chunks."""
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
        """Attend for all positions. See `AttentionBackend`."""
        m, num_positions = metadata, len(query)
        is_many = self.attends_together and num_positions >= MANY_POSITIONS
        if not (is_many and launch.runs_triton(query)):
            return self.plain(query, key_cache, value_cache, metadata, layer, launch)
        return attend_drafts(
            query, key_cache, value_cache, m.block_table, m.decode_lens,
            self.offsets[:num_positions], layer.scale, layer.window, workspace=self.workspace,
            sinks=layer.sinks, launch=launch,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs"])
def _attend_drafts_kernel(
    query, key_cache, value_cache, block_table, context_lens, output,
    partial_output, partial_lse, arrivals, offsets, sinks,
    num_seqs, score_scale, window,
    query_stride, query_head_stride, block_stride, slot_stride, head_stride, table_stride,
    output_stride, output_head_stride,
    NUM_SEQS_PAD: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_POW2: tl.constexpr,
    PLACES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    IS_LARGE_CACHE: tl.constexpr,
    HAS_MANY_TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    worker = tl.program_id(0) // NUM_KV_HEADS
    num_workers = tl.num_programs(0) // NUM_KV_HEADS

    # The share of this program, as in `flash_decode`, but over groups of positions.
    seqs = tl.arange(0, NUM_SEQS_PAD)
    is_seq = seqs < num_seqs
    lens = tl.load(context_lens + seqs, mask=is_seq, other=0)
    first_tiles = tl.maximum(lens - window, 0) // TILE if HAS_WINDOW else tl.zeros_like(lens)
    # A group's first position attends for the others, and its context is as long as the last one's.
    places = tl.load(offsets + seqs, mask=is_seq, other=0)
    for i in tl.static_range(1, PLACES):
        is_there = seqs + i < num_seqs
        is_own = tl.load(offsets + seqs + i, mask=is_there, other=0) == places + i
        later = tl.load(context_lens + seqs + i, mask=is_there & is_own, other=0)
        lens = tl.maximum(lens, later)
    is_counted = is_seq & (places % PLACES == 0)
    # A padding row counts one tile, so that a program owns it and writes its zeros.
    tile_counts = tl.maximum((lens + TILE - 1) // TILE - first_tiles, 1)
    tile_counts = tl.where(is_counted, tile_counts, 0)
    seq_ends = tl.cumsum(tile_counts, 0)
    total_tiles = tl.sum(tile_counts, 0)
    if HAS_MANY_TILES:
        total_tiles = total_tiles.to(tl.int64)
    num_workers = tl.minimum(num_workers, total_tiles)
    if worker >= num_workers:
        return  # without waiting for the previous kernel, so that its registers are free at once
    share_start = start_of_share(worker, num_workers, total_tiles)
    share_end = start_of_share(worker + 1, num_workers, total_tiles)
    first_seq = tl.sum(((seq_ends <= share_start) & is_seq).to(tl.int32), 0)
    last_seq = tl.sum(((seq_ends < share_end) & is_seq).to(tl.int32), 0)
    seq_start = tl.sum(tl.where(seqs < first_seq, tile_counts, 0), 0).to(total_tiles.dtype)

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, HEAD_DIM_PAD)
    tile_tokens = tl.arange(0, TILE)
    row_place = rows // GROUP_POW2
    num_partials = 2 * tl.num_programs(0) * GROUP_POW2  # rows of partial sums of one position
    is_head = (rows % GROUP_POW2 < GROUP) & (row_place < PLACES)
    cache_dims = kv_head * head_stride + dims
    seq = first_seq
    while seq <= last_seq:
        context_len = tl.load(context_lens + seq)
        first_tile = tl.maximum(context_len - window, 0) // TILE if HAS_WINDOW else 0
        place = tl.load(offsets + seq)
        is_row = is_head & (seq + row_place < num_seqs)
        found = tl.load(offsets + seq + row_place, mask=is_row, other=-1)
        is_row = is_row & (found == place + row_place)
        row_lens = tl.load(context_lens + seq + row_place, mask=is_row, other=0)
        context_len = tl.max(row_lens)
        last_place = seq + tl.max(tl.where(row_lens > 0, row_place, 0))
        next_seq = seq + 1 + tl.max(tl.where(is_row, row_place, 0))
        row_lens = row_lens[:, None]
        row_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        num_tiles = (context_len + TILE - 1) // TILE - first_tile
        seq_end = seq_start + tl.maximum(num_tiles, 1)
        own_start = tl.maximum(share_start, seq_start)
        own_end = tl.minimum(share_end, seq_end)
        first_worker = worker_of(seq_start, num_workers, total_tiles)
        last_worker = worker_of(seq_end - 1, num_workers, total_tiles)
        first_start = start_of_share(first_worker, num_workers, total_tiles)
        first_slot = (first_start != seq_start).to(tl.int32)

        row_seq = (seq + row_place)[:, None]
        heads = (kv_head * GROUP + rows % GROUP_POW2)[:, None]
        accumulator = tl.zeros([ROWS, HEAD_DIM_PAD], dtype=tl.float32)
        row_max = tl.full([ROWS], FLOOR, dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        if sinks is not None:  # they count once, with the first tile of the group
            row_max = load_sinks(sinks, kv_head * GROUP + rows % GROUP_POW2, is_head)
            row_sum += tl.where(own_start == seq_start, 1.0, 0.0)
        low = (own_start - seq_start).to(tl.int32) + first_tile
        high = tl.where(context_len > 0, (own_end - seq_start).to(tl.int32) + first_tile, 0)
        table = block_table + last_place * table_stride
        # Unsigned, so that dividing by the block size is a shift. Past the end of the context the
        # last token is read again, since it is finite, and an unused slot may hold a NaN.
        last_token = tl.maximum(context_len - 1, 0).to(tl.uint32)
        tokens = tl.minimum((low * TILE + tile_tokens).to(tl.uint32), last_token)
        blocks = tl.load(table + tokens // BLOCK_SIZE)
        wait_for_previous(PDL)  # wait for queries, and the newest keys and values
        q = tl.load(
            query + row_seq * query_stride + heads * query_head_stride + dims[None, :],
            mask=row_mask,
            other=0.0,
        )
        q = as_operand(q, key_cache.dtype.element_ty)
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
            visible = columns < row_lens
            if HAS_WINDOW:
                visible = visible & (columns >= row_lens - window)
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
                weights.to(q.dtype), values.to(q.dtype), accumulator, input_precision="ieee"
            )
        result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]

        output_pointers = (
            output + row_seq * output_stride + heads * output_head_stride + dims[None, :]
        )
        if first_worker == last_worker:
            tl.store(output_pointers, result.to(output.dtype.element_ty), mask=row_mask)
        else:
            slot = 2 * tl.program_id(0) + (own_start != share_start).to(tl.int32)
            partial_rows = row_place * num_partials + slot * GROUP_POW2 + rows % GROUP_POW2
            partials = partial_output + partial_rows[:, None] * HEAD_DIM_PAD + dims[None, :]
            tl.store(partials, result, mask=row_mask)
            tl.store(partial_lse + partial_rows, row_max + tl.log2(row_sum), mask=is_row)
            # All threads must have stored before the count goes up: the last program reads it all.
            tl.debug_barrier()
            arrival = arrivals + seq * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == last_worker - first_worker:
                # One position after another: registers do not hold them all together.
                for own_place in range(next_seq - seq):
                    first_row = own_place * num_partials
                    merge_parts(
                        partial_output + first_row * HEAD_DIM_PAD, partial_lse + first_row,
                        first_worker, last_worker, first_slot, kv_head,
                        output + (seq + own_place) * output_stride, output_head_stride,
                        NUM_KV_HEADS, GROUP, GROUP_POW2, HEAD_DIM, HEAD_DIM_PAD,
                    )  # fmt: skip
                tl.store(arrival, 0)  # as the next launch expects it
        seq_start = seq_end
        seq = next_seq
