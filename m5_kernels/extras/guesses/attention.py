"""Attention of a step with guesses, those of a request together, where that pays.

The smallest product of a tensor core has 16 rows, and the query heads that share a KV head are
fewer: so guesses have room beside them. Up to so many places of a request attend together, each row
to what stands before its own place, and the keys and values are read once for all of them. Else it
is `kernels.flash_decode`, with its shares and its merge: here a share is of a group of places.
"""

from __future__ import annotations

import torch

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.kernels.backend import next_power_of_2, runs_triton, tl, triton
from m5_kernels.kernels.early_start import launch_options, wait_for_previous
from m5_kernels.kernels.flash_decode import (
    FLOOR,
    MIN_ROWS,
    DecodeWorkspace,
    flash_decode,
    flash_decode_torch,
    merge_parts,
)
from m5_kernels.kernels.paged_prefill import LOG2_E
from m5_kernels.kernels.step_metadata import StepMetadata

MANY_PLACES = 32
"""From so many on, a request's guesses attend together. Fewer requests are cut into more parts, and
to merge those of several places takes longer than to read the keys and values again."""


def attend_guesses(
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
) -> torch.Tensor:
    """As `flash_decode`, where some sequences are guesses; its twin is that of `flash_decode`.

    offsets: int32 `[num_seqs]`: 1, 2 ... follow the request's own place, which has 0, and are as
    many tokens longer, or padding. workspace: of `guess_workspace`.
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
        workspace = guess_workspace(
            num_seqs, num_q_heads, num_kv_heads, head_dim, key_cache.dtype, query.device
        )
    if num_seqs * num_kv_heads > workspace.arrivals.numel():
        limit = workspace.arrivals.numel() // num_kv_heads
        raise ValueError(f"{num_seqs} sequences, but the workspace holds {limit}")
    tile, group = workspace.tile, num_q_heads // num_kv_heads
    group_pow2 = next_power_of_2(group)
    _attend_guesses_kernel[(workspace.programs_per_head * num_kv_heads,)](
        query, key_cache, value_cache, block_table, context_lens, output,
        workspace.partial_output, workspace.partial_lse, workspace.arrivals, offsets,
        num_seqs,
        (head_dim**-0.5 if scale is None else scale) * LOG2_E,
        window or 0,
        query.stride(0), query.stride(1), *key_cache.stride()[:3], block_table.stride(0),
        output.stride(0), output.stride(1),
        NUM_SEQS_PAD=max(16, next_power_of_2(num_seqs)),  # a kernel less for each small number
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
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **launch_options(),
    )  # fmt: skip
    return output


def guess_workspace(
    max_num_seqs: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DecodeWorkspace:
    """One for as many rows as the smallest product has, those of several places."""
    num_rows = max(MIN_ROWS, next_power_of_2(num_q_heads // num_kv_heads))
    return DecodeWorkspace.allocate(
        max_num_seqs, num_kv_heads * num_rows, num_kv_heads, head_dim, dtype, device
    )


class GuessAttention:
    """Takes the place of `decoder.attention.Attention` in steps with guesses.

    Args:
        max_places: most places of a step.
        offsets: int32 `[max_places]`, which guess each is.
    """

    def __init__(
        self,
        config: DecoderConfig,
        max_places: int,
        offsets: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.offsets = offsets
        self.workspace: DecodeWorkspace | None = None
        if device.type == "cuda":
            self.workspace = guess_workspace(
                max_places, config.num_q_heads, config.num_kv_heads, config.head_dim, dtype, device
            )

    def prepare(self, metadata: StepMetadata) -> StepMetadata:
        """A step with guesses has no chunks."""
        return metadata

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """As `Attention`, all of whose sequences have one new token."""
        m, num_places = metadata, len(query)
        if num_places < MANY_PLACES:
            return flash_decode(
                query, key_cache, value_cache, m.block_table, m.decode_lens, scale, window,
                workspace=self.workspace,
            )  # fmt: skip
        return attend_guesses(
            query, key_cache, value_cache, m.block_table, m.decode_lens,
            self.offsets[:num_places], scale, window, workspace=self.workspace,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs"])
def _attend_guesses_kernel(
    query, key_cache, value_cache, block_table, context_lens, output,
    partial_output, partial_lse, arrivals, offsets,
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
    PDL: tl.constexpr,
):  # fmt: skip
    kv_head = tl.program_id(0) % NUM_KV_HEADS
    worker = tl.program_id(0) // NUM_KV_HEADS
    num_workers = tl.num_programs(0) // NUM_KV_HEADS

    # The share of this program: tiles [share_start, share_end) of all sequences laid end to end.
    seq_ids = tl.arange(0, NUM_SEQS_PAD)
    lens = tl.load(context_lens + seq_ids, mask=seq_ids < num_seqs, other=0)
    first_tiles = tl.maximum(lens - window, 0) // TILE if HAS_WINDOW else tl.zeros_like(lens)
    is_counted = seq_ids < num_seqs
    # A place attends for those that follow it, and is as long as the last of them.
    places = tl.load(offsets + seq_ids, mask=is_counted, other=0)
    for i in tl.static_range(1, PLACES):
        is_there = seq_ids + i < num_seqs
        is_own = tl.load(offsets + seq_ids + i, mask=is_there, other=0) == places + i
        later = tl.load(context_lens + seq_ids + i, mask=is_there & is_own, other=0)
        lens = tl.maximum(lens, later)
    is_counted = is_counted & (places % PLACES == 0)
    # A padding row counts one tile, so that somebody owns it and writes its zeros.
    counts = tl.maximum((lens + TILE - 1) // TILE - first_tiles, 1)
    counts = tl.where(is_counted, counts, 0)
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
    row_place = rows // GROUP_POW2
    num_partials = 2 * tl.num_programs(0) * GROUP_POW2  # rows of partial sums of one place
    is_head = (rows % GROUP_POW2 < GROUP) & (row_place < PLACES)
    cache_dims = kv_head * head_stride + dims
    seq_id = seq
    while seq_id <= last_seq:
        context_len = tl.load(context_lens + seq_id)
        first_tile = tl.maximum(context_len - window, 0) // TILE if HAS_WINDOW else 0
        place = tl.load(offsets + seq_id)
        is_row = is_head & (seq_id + row_place < num_seqs)
        found = tl.load(offsets + seq_id + row_place, mask=is_row, other=-1)
        is_row = is_row & (found == place + row_place)
        row_lens = tl.load(context_lens + seq_id + row_place, mask=is_row, other=0)
        context_len = tl.max(row_lens)
        last_place = seq_id + tl.max(tl.where(row_lens > 0, row_place, 0))
        next_seq = seq_id + 1 + tl.max(tl.where(is_row, row_place, 0))
        row_lens = row_lens[:, None]
        row_mask = is_row[:, None] & (dims < HEAD_DIM)[None, :]
        num_tiles = (context_len + TILE - 1) // TILE - first_tile
        seq_end = seq_start + tl.maximum(num_tiles, 1)
        begin = tl.maximum(share_start, seq_start)
        end = tl.minimum(share_end, seq_end)
        first_worker = ((seq_start + 1) * num_workers - 1) // total
        last_worker = (seq_end * num_workers - 1) // total
        # Slot 0 of a program holds the sequence its share begins in, slot 1 the last one.
        first_slot = (first_worker * total // num_workers != seq_start).to(tl.int32)

        row_seq = (seq_id + row_place)[:, None]
        heads = (kv_head * GROUP + rows % GROUP_POW2)[:, None]
        accumulator = tl.zeros([ROWS, HEAD_DIM_PAD], dtype=tl.float32)
        row_max = tl.full([ROWS], FLOOR, dtype=tl.float32)
        row_sum = tl.zeros([ROWS], dtype=tl.float32)
        low = (begin - seq_start).to(tl.int32) + first_tile
        high = tl.where(context_len > 0, (end - seq_start).to(tl.int32) + first_tile, 0)
        table = block_table + last_place * table_stride
        # Unsigned, so that dividing by the block size is a shift. Past the end of the context the
        # last token is read again: unlike what lies in the unused slots, it is surely finite.
        last_token = tl.maximum(context_len - 1, 0).to(tl.uint32)
        tokens = tl.minimum((low * TILE + tile_tokens).to(tl.uint32), last_token)
        blocks = tl.load(table + tokens // BLOCK_SIZE)
        wait_for_previous(PDL)  # for queries, and the newest keys and values
        q = tl.load(
            query + row_seq * query_stride + heads * query_head_stride + dims[None, :],
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
                weights.to(values.dtype), values, accumulator, input_precision="ieee"
            )
        result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)[:, None]

        output_pointers = (
            output + row_seq * output_stride + heads * output_head_stride + dims[None, :]
        )
        if first_worker == last_worker:
            tl.store(output_pointers, result.to(output.dtype.element_ty), mask=row_mask)
        else:
            slot = 2 * tl.program_id(0) + (begin != share_start).to(tl.int32)
            partial_rows = row_place * num_partials + slot * GROUP_POW2 + rows % GROUP_POW2
            partials = partial_output + partial_rows[:, None] * HEAD_DIM_PAD + dims[None, :]
            tl.store(partials, result, mask=row_mask)
            tl.store(partial_lse + partial_rows, row_max + tl.log2(row_sum), mask=is_row)
            # Everybody's stores before the count goes up: the last to arrive reads them all.
            tl.debug_barrier()
            arrival = arrivals + seq_id * NUM_KV_HEADS + kv_head
            if tl.atomic_add(arrival, 1, sem="acq_rel") == last_worker - first_worker:
                # One place after another: together they would be more than registers hold.
                for own_place in range(next_seq - seq_id):
                    first_row = own_place * num_partials
                    merge_parts(
                        partial_output + first_row * HEAD_DIM_PAD, partial_lse + first_row,
                        first_worker, last_worker, first_slot, kv_head,
                        output + (seq_id + own_place) * output_stride, output_head_stride,
                        NUM_KV_HEADS, GROUP, GROUP_POW2, HEAD_DIM, HEAD_DIM_PAD,
                    )  # fmt: skip
                tl.store(arrival, 0)  # as the next launch expects it
        seq_start = seq_end
        seq_id = next_seq
