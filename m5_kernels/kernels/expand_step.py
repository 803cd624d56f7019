"""The first kernel of a step, which reads the rows of state, and the last one, which extends them.

`expand_step` fills the step's metadata from the rows. `append_sampled` counts their new tokens as
computed and appends the sampled ones. So a token reaches the next step without the host.

Program i of `expand_step` fills row i of the per-row outputs and the i-th block of per-token ones.
"""

from __future__ import annotations

import torch

from .launch import PLAIN, Launch
from .pdl import wait_for_previous
from .step_metadata import RowState, StepMetadata
from .triton_or_twin import ceil_div, lanes_for, tl, triton


def expand_step(
    state: RowState,
    row_ids: torch.Tensor,
    num_new_tokens: torch.Tensor,
    output: StepMetadata,
    launch: Launch = PLAIN,
) -> None:
    """Fill `output` for a step. Nothing is read back, so it can be part of a CUDA graph.

    row_ids: int32 `[num_seqs]`, the rows of the step's sequences: first those with one new token,
    then chunks, then padding, which is -1. A row's computed and new tokens together must not exceed
    max_model_len: that is not checked here.
    num_new_tokens: int32 `[num_seqs]`, of each sequence; not read for padding.
    """
    if not launch.runs_triton(row_ids):
        expand_step_torch(state, row_ids, num_new_tokens, output)
        return
    num_seqs, num_tokens = len(row_ids), len(output.input_ids)
    block = 128
    launch.kernel(_expand_step_kernel, (max(num_seqs, ceil_div(num_tokens, block)),))(
        state.token_ids, state.block_table, state.num_computed_tokens, state.prompt_lens,
        row_ids, num_new_tokens,
        output.input_ids, output.positions, output.slot_mapping,
        output.context_lens, output.query_start_loc, output.output_positions, output.decode_lens,
        output.block_table, output.first_chunk,
        num_seqs, num_tokens,
        state.token_ids.stride(0), state.block_table.stride(0), output.block_table.stride(0),
        NUM_SEQS_PAD=lanes_for(num_seqs),
        BLOCK_SIZE=state.block_size,
        BLOCK=block,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _expand_step_kernel(
    token_ids, block_table, num_computed_tokens, prompt_lens,
    row_ids, num_new_tokens,
    input_ids, positions, slot_mapping,
    context_lens, query_start_loc, output_positions, decode_lens, step_block_table, first_chunk,
    num_seqs, num_tokens,
    token_stride, table_stride, step_table_stride,
    NUM_SEQS_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    seqs = tl.arange(0, NUM_SEQS_PAD)
    rows = tl.load(row_ids + seqs, mask=seqs < num_seqs, other=-1)
    num_new = tl.load(num_new_tokens + seqs, mask=rows >= 0, other=0)
    ends = tl.cumsum(num_new, 0)

    # Per sequence.
    seq = tl.program_id(0)
    if seq < num_seqs:
        end = tl.sum(tl.where(seqs == seq, ends, 0), 0)
        new = tl.sum(tl.where(seqs == seq, num_new, 0), 0)
        tl.store(query_start_loc + seq, end - new)
        if seq == num_seqs - 1:
            tl.store(query_start_loc + num_seqs, end)
            tl.store(first_chunk, tl.sum((num_new == 1).to(tl.int32), 0))
        row = tl.load(row_ids + seq).to(tl.int64)
        if row >= 0:
            context_len = tl.load(num_computed_tokens + row) + new
            tl.store(context_lens + seq, context_len)
            tl.store(decode_lens + seq, tl.where(new == 1, context_len, 0))
            tl.store(output_positions + seq, context_len - tl.load(prompt_lens + row))
            for start in range(0, (context_len + BLOCK_SIZE - 1) // BLOCK_SIZE, BLOCK):
                columns = start + tl.arange(0, BLOCK)
                mask = columns * BLOCK_SIZE < context_len
                blocks = tl.load(block_table + row * table_stride + columns, mask=mask)
                tl.store(step_block_table + seq * step_table_stride + columns, blocks, mask=mask)
        else:
            tl.store(context_lens + seq, 0)
            tl.store(decode_lens + seq, 0)
            tl.store(output_positions + seq, 0)

    # Per token: a token's sequence is the number of sequences that end at or before the token.
    if tl.program_id(0) * BLOCK < num_tokens:
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_before = (ends[None, :] <= tokens[:, None]) & (seqs < num_seqs)[None, :]
        token_seqs = tl.sum(is_before.to(tl.int32), 1)
        is_new = (tokens < num_tokens) & (token_seqs < num_seqs)
        start = tl.sum(tl.where(is_before, num_new[None, :], 0), 1)
        token_rows = tl.load(row_ids + token_seqs, mask=is_new, other=-1).to(tl.int64)
        is_new = is_new & (token_rows >= 0)
        computed = tl.load(num_computed_tokens + token_rows, mask=is_new, other=0)
        position = tl.where(is_new, computed + tokens - start, 0)
        ids = tl.load(token_ids + token_rows * token_stride + position, mask=is_new, other=0)
        table = block_table + token_rows * table_stride + position // BLOCK_SIZE
        blocks = tl.load(table, mask=is_new, other=0).to(tl.int64)
        slots = tl.where(is_new, blocks * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(input_ids + tokens, ids, mask=tokens < num_tokens)
        tl.store(positions + tokens, position, mask=tokens < num_tokens)
        tl.store(slot_mapping + tokens, slots, mask=tokens < num_tokens)


def append_sampled(
    state: RowState,
    row_ids: torch.Tensor,
    num_new_tokens: torch.Tensor,
    samples: torch.Tensor,
    sampled: torch.Tensor,
    launch: Launch = PLAIN,
) -> None:
    """End a step on the device: count the new tokens as computed, and append the sampled ones.

    row_ids, num_new_tokens: as given to `expand_step`. samples: int32 `[num_seqs]`, 0 for a chunk
    that does not reach the last known token. sampled: int32 `[num_seqs]`; -1 appends nothing. A row
    that is full stays as it is.
    """
    if not launch.runs_triton(row_ids):
        append_sampled_torch(state, row_ids, num_new_tokens, samples, sampled)
        return
    num_seqs, block = len(row_ids), 128
    launch.kernel(_append_sampled_kernel, (ceil_div(num_seqs, block),))(
        state.token_ids, state.num_computed_tokens, row_ids, num_new_tokens, samples, sampled,
        num_seqs, state.token_ids.stride(0), state.token_ids.shape[1],
        BLOCK=block,
        **launch.pdl_options(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs"])
def _append_sampled_kernel(
    token_ids, num_computed_tokens, row_ids, num_new_tokens, samples, sampled,
    num_seqs, token_stride, max_model_len,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    seqs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.load(row_ids + seqs, mask=seqs < num_seqs, other=-1).to(tl.int64)
    mask = rows >= 0
    num_new = tl.load(num_new_tokens + seqs, mask=mask, other=0)
    computed = tl.load(num_computed_tokens + rows, mask=mask, other=0) + num_new
    mask = mask & (computed <= max_model_len)
    tl.store(num_computed_tokens + rows, computed, mask=mask)
    tokens = tl.load(sampled + seqs, mask=mask, other=-1)
    mask = mask & (tl.load(samples + seqs, mask=mask, other=0) > 0)
    mask = mask & (tokens >= 0) & (computed < max_model_len)
    tl.store(token_ids + rows * token_stride + computed, tokens.to(tl.int32), mask=mask)


def expand_step_torch(
    state: RowState,
    row_ids: torch.Tensor,
    num_new_tokens: torch.Tensor,
    output: StepMetadata,
) -> None:
    """Specify `expand_step`, one sequence after another."""
    output.input_ids.zero_()
    output.positions.zero_()
    output.slot_mapping.fill_(-1)
    output.context_lens.zero_()
    output.output_positions.zero_()
    output.decode_lens.zero_()
    output.first_chunk.zero_()
    rows = row_ids.tolist()
    start = 0
    for seq, (row, new) in enumerate(zip(rows, num_new_tokens.tolist(), strict=True)):
        output.query_start_loc[seq] = start
        if row >= 0:
            computed = int(state.num_computed_tokens[row])
            chunk = slice(start, start + new)
            positions = torch.arange(computed, computed + new, device=row_ids.device)
            blocks = state.block_table[row, positions // state.block_size].long()
            output.input_ids[chunk] = state.token_ids[row, positions]
            output.positions[chunk] = positions.int()
            output.slot_mapping[chunk] = blocks * state.block_size + positions % state.block_size
            output.context_lens[seq] = computed + new
            if new == 1:
                output.decode_lens[seq] = computed + new
                output.first_chunk.add_(1)
            output.output_positions[seq] = computed + new - state.prompt_lens[row]
            num_blocks = ceil_div(computed + new, state.block_size)
            output.block_table[seq, :num_blocks] = state.block_table[row, :num_blocks]
            start += new
    output.query_start_loc[len(rows)] = start


def append_sampled_torch(
    state: RowState,
    row_ids: torch.Tensor,
    num_new_tokens: torch.Tensor,
    samples: torch.Tensor,
    sampled: torch.Tensor,
) -> None:
    """Specify `append_sampled`."""
    max_model_len = state.token_ids.shape[1]
    of_rows = zip(
        *(each.tolist() for each in (row_ids, num_new_tokens, samples, sampled)), strict=True
    )
    for row, new, is_wanted, token in of_rows:
        if row < 0:
            continue
        computed = int(state.num_computed_tokens[row]) + new
        if computed <= max_model_len:
            state.num_computed_tokens[row] = computed
        if is_wanted and token >= 0 and computed < max_model_len:
            state.token_ids[row, computed] = token
