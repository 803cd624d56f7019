"""Draft tokens on the GPU: proposed from the token ids there, and verified without the host.

A request with k draft tokens has 1 + k positions in a step, all with the same row of state. Each
position is a sequence of one new token: `expand_drafts` moves the j-th by j. Every layer writes the
keys and values of all positions before any of them attends, so each sees the drafts before it.

    token_ids    a b c d a b | c d .        known up to "|"; "a b" was there before, then "c d"
    positions    b   c   d                  offsets 0, 1, 2
    sampled      c   d   x                  two drafts are accepted, x is one more token
    kept         -   -   x                  the last kept position counts 1 + 2 tokens as computed

Draft tokens are in `token_ids` after the known tokens, where the next step finds the accepted ones.
`propose` writes them, or the host does. `accept` says how many of them were right.
"""

from __future__ import annotations

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.step_metadata import RowState, StepMetadata
from m5_kernels.kernels.triton_or_twin import ceil_div, tl, triton

MAX_DRAFTS = 16
"""Most draft tokens of a row."""
REJECTED = -2
"""Replaces a token that was sampled after a wrong draft token."""
MISSING = -3
"""Replaces a token at the position of a draft token that could not be proposed."""


def propose(
    state: RowState,
    num_drafts: torch.Tensor,
    row_ids: torch.Tensor,
    num_wanted: torch.Tensor,
    launch: Launch = PLAIN,
) -> None:
    """Propose what came after the same last tokens before: three of them, or else two, as
    `NgramProposer`.

    row_ids: int32 `[num_positions]`; num_wanted: int32 `[num_positions]`, how many draft tokens a
    position wants for its row, 0 for none. Draft tokens are written into `state.token_ids`, after
    the token that the step computes. Their number is written into `num_drafts`, int32 `[num_rows]`:
    all that are wanted, or 0.
    """
    if not launch.runs_triton(row_ids):
        propose_torch(state, num_drafts, row_ids, num_wanted)
        return
    launch.kernel(_propose_kernel, (len(row_ids),))(
        state.token_ids, state.num_computed_tokens, num_drafts, row_ids, num_wanted,
        state.token_ids.stride(0),
        BLOCK=1024, MOST=MAX_DRAFTS,
    )  # fmt: skip


@triton.jit
def _propose_kernel(
    token_ids, num_computed_tokens, num_drafts, row_ids, num_wanted,
    token_stride,
    BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row = tl.load(row_ids + tl.program_id(0)).to(tl.int64)
    wanted = tl.load(num_wanted + tl.program_id(0))
    if (row >= 0) & (wanted > 0):
        tokens = token_ids + row * token_stride
        num_known = tl.load(num_computed_tokens + row) + 1
        last = tl.load(tokens + num_known - 1)
        second = tl.load(tokens + num_known - 2, mask=num_known > 1, other=-1)
        third = tl.load(tokens + num_known - 3, mask=num_known > 2, other=-1)
        after_three = tl.zeros([BLOCK], dtype=tl.int32)
        after_two = tl.zeros([BLOCK], dtype=tl.int32)
        for start in range(0, num_known, BLOCK):
            place = start + tl.arange(0, BLOCK)  # index of the token after an n-gram
            is_known = (place >= 2) & (place < num_known)
            is_equal = is_known & (tl.load(tokens + place - 1, mask=is_known, other=-2) == last)
            is_equal &= tl.load(tokens + place - 2, mask=is_equal, other=-2) == second
            after_two = tl.where(is_equal, place, after_two)
            is_equal &= place >= 3
            is_equal &= tl.load(tokens + place - 3, mask=is_equal, other=-2) == third
            after_three = tl.where(is_equal, place, after_three)
        first = tl.max(after_three, 0)
        first = tl.where(first > 0, first, tl.max(after_two, 0))
        number = tl.where(first > 0, wanted, 0)
        tl.store(num_drafts + row, number)
        index = tl.arange(0, MOST)
        mask = index < number
        # What repeated may repeat again: after the last known token, copy from the start again.
        source = first + index % tl.maximum(num_known - first, 1)
        drafts = tl.load(tokens + source, mask=mask, other=0)
        tl.store(tokens + num_known + index, drafts, mask=mask)


def propose_torch(
    state: RowState, num_drafts: torch.Tensor, row_ids: torch.Tensor, num_wanted: torch.Tensor
) -> None:
    """Specify `propose`."""
    for row, wanted in zip(row_ids.tolist(), num_wanted.tolist(), strict=True):
        if row < 0 or wanted == 0:
            continue
        num_known = int(state.num_computed_tokens[row]) + 1
        known = state.token_ids[row, :num_known].tolist()
        ends = [
            end
            for length in (3, 2)
            for end in range(num_known - 1, length - 1, -1)
            if known[end - length : end] == known[-length:]
        ]
        num_drafts[row] = wanted if ends else 0
        if ends:
            drafts = (known[ends[0] :] * wanted)[:wanted]
            state.token_ids[row, num_known : num_known + wanted] = torch.tensor(drafts)


def expand_drafts(
    state: RowState,
    num_drafts: torch.Tensor,
    row_ids: torch.Tensor,
    offsets: torch.Tensor,
    output: StepMetadata,
    launch: Launch = PLAIN,
) -> None:
    """Fill `output` for a step of positions, as `expand_step` does for a step of rows.

    row_ids: int32 `[num_positions]`, -1 for none; offsets: int32 `[num_positions]`, how far a
    position is after the row's computed tokens: 0, or the number of the draft token. Draft tokens
    that the row does not have are padding. `first_chunk` is not written: there are no chunks.
    """
    if not launch.runs_triton(row_ids):
        expand_drafts_torch(state, num_drafts, row_ids, offsets, output)
        return
    launch.kernel(_expand_drafts_kernel, (len(row_ids),))(
        state.token_ids, state.block_table, state.num_computed_tokens, state.prompt_lens,
        num_drafts, row_ids, offsets,
        output.input_ids, output.positions, output.slot_mapping,
        output.context_lens, output.output_positions, output.decode_lens, output.block_table,
        state.token_ids.stride(0), state.block_table.stride(0), output.block_table.stride(0),
        BLOCK_SIZE=state.block_size,
        BLOCK=128,
    )  # fmt: skip


@triton.jit
def _expand_drafts_kernel(
    token_ids, block_table, num_computed_tokens, prompt_lens,
    num_drafts, row_ids, offsets,
    input_ids, positions, slot_mapping,
    context_lens, output_positions, decode_lens, step_block_table,
    token_stride, table_stride, step_table_stride,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    place = tl.program_id(0)
    row = tl.load(row_ids + place).to(tl.int64)
    offset = tl.load(offsets + place)
    if (row >= 0) & (offset > 0):
        row = tl.where(offset <= tl.load(num_drafts + row), row, -1)
    if row >= 0:
        position = tl.load(num_computed_tokens + row) + offset
        block = tl.load(block_table + row * table_stride + position // BLOCK_SIZE).to(tl.int64)
        tl.store(input_ids + place, tl.load(token_ids + row * token_stride + position))
        tl.store(positions + place, position)
        tl.store(slot_mapping + place, block * BLOCK_SIZE + position % BLOCK_SIZE)
        tl.store(context_lens + place, position + 1)
        tl.store(decode_lens + place, position + 1)
        tl.store(output_positions + place, position + 1 - tl.load(prompt_lens + row))
        for start in range(0, position // BLOCK_SIZE + 1, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns * BLOCK_SIZE <= position
            blocks = tl.load(block_table + row * table_stride + columns, mask=mask)
            tl.store(step_block_table + place * step_table_stride + columns, blocks, mask=mask)
    else:
        tl.store(input_ids + place, 0)
        tl.store(positions + place, 0)
        tl.store(slot_mapping + place, tl.full([], -1, tl.int64))
        tl.store(context_lens + place, 0)
        tl.store(decode_lens + place, 0)
        tl.store(output_positions + place, 0)


def expand_drafts_torch(
    state: RowState,
    num_drafts: torch.Tensor,
    row_ids: torch.Tensor,
    offsets: torch.Tensor,
    output: StepMetadata,
) -> None:
    """Specify `expand_drafts`, one position after another."""
    per_place = output.input_ids, output.positions, output.context_lens, output.decode_lens
    for tensor in (*per_place, output.output_positions):
        tensor.zero_()
    output.slot_mapping.fill_(-1)
    for place, (row, offset) in enumerate(zip(row_ids.tolist(), offsets.tolist(), strict=True)):
        if row < 0 or (offset and offset > num_drafts[row]):
            continue
        position = int(state.num_computed_tokens[row]) + offset
        block = int(state.block_table[row, position // state.block_size])
        output.input_ids[place] = state.token_ids[row, position]
        output.positions[place] = position
        output.slot_mapping[place] = block * state.block_size + position % state.block_size
        output.context_lens[place] = output.decode_lens[place] = position + 1
        output.output_positions[place] = position + 1 - state.prompt_lens[row]
        num_blocks = ceil_div(position + 1, state.block_size)
        output.block_table[place, :num_blocks] = state.block_table[row, :num_blocks]


def accept(
    state: RowState,
    num_drafts: torch.Tensor,
    row_ids: torch.Tensor,
    offsets: torch.Tensor,
    sampled: torch.Tensor,
    launch: Launch = PLAIN,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Find which sampled tokens are kept: those after draft tokens that are all equal to what was
    sampled.

    row_ids, offsets, sampled: int32 `[num_positions]`. The positions of a row with draft tokens
    follow each other, with offsets 0, 1, 2 ...

    Returns:
        int32 `[num_positions]` each: the row, at the last kept position of each row, and -1
        elsewhere; the tokens, `REJECTED` where they are not kept, `MISSING` where there was no
        draft token.
    """
    if not launch.runs_triton(row_ids):
        return accept_torch(state, num_drafts, row_ids, offsets, sampled)
    last_rows, tokens = torch.empty_like(row_ids), torch.empty_like(sampled)
    num_positions, block = len(row_ids), 128
    launch.kernel(_accept_kernel, (ceil_div(num_positions, block),))(
        state.token_ids, state.num_computed_tokens, num_drafts,
        row_ids, offsets, sampled, last_rows, tokens,
        num_positions, state.token_ids.stride(0),
        BLOCK=block, REJECTED=REJECTED, MISSING=MISSING,
    )  # fmt: skip
    return last_rows, tokens


@triton.jit(do_not_specialize=["num_positions"])
def _accept_kernel(
    token_ids, num_computed_tokens, num_drafts,
    row_ids, offsets, sampled, last_rows, tokens,
    num_positions, token_stride,
    BLOCK: tl.constexpr, REJECTED: tl.constexpr, MISSING: tl.constexpr,
):  # fmt: skip
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_there = places < num_positions
    rows = tl.load(row_ids + places, mask=is_there, other=-1).to(tl.int64)
    mask = rows >= 0
    offset = tl.load(offsets + places, mask=mask, other=0)
    drafts = tl.load(num_drafts + rows, mask=mask, other=0)
    known = token_ids + rows * token_stride + tl.load(num_computed_tokens + rows, mask=mask)
    # Draft token i of a row, 1 .. offset, is right if it was sampled at the position before it.
    is_kept = mask & (offset <= drafts)
    for i in range(1, tl.max(offset, 0) + 1):
        checked = is_kept & (i <= offset)
        draft = tl.load(known + i, mask=checked, other=0)
        before = tl.load(sampled + places - offset + i - 1, mask=checked, other=0)
        is_kept = is_kept & ((i > offset) | (draft == before))
    own = tl.load(sampled + places, mask=is_there, other=-1)
    next_offset = tl.load(
        offsets + places + 1, mask=is_kept & (places + 1 < num_positions), other=0
    )
    has_next = is_kept & (next_offset == offset + 1) & (offset < drafts)
    next_row = tl.load(row_ids + places + 1, mask=has_next, other=-1)
    has_next = has_next & (next_row == rows)
    next_guess = tl.load(known + offset + 1, mask=has_next, other=0)
    is_last = is_kept & ~(has_next & (next_guess == own))
    tl.store(last_rows + places, tl.where(is_last, rows, -1).to(tl.int32), mask=is_there)
    dropped = tl.where(offset > drafts, MISSING, REJECTED)
    tl.store(tokens + places, tl.where(is_kept | ~mask, own, dropped), mask=is_there)


def accept_torch(
    state: RowState,
    num_drafts: torch.Tensor,
    row_ids: torch.Tensor,
    offsets: torch.Tensor,
    sampled: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Specify `accept`."""
    last_rows, tokens = torch.full_like(row_ids, -1), sampled.clone()
    last = -1
    for place, (row, offset) in enumerate(zip(row_ids.tolist(), offsets.tolist(), strict=True)):
        if row < 0:
            continue
        position = int(state.num_computed_tokens[row]) + offset
        is_kept = offset == 0 or (
            last == place - 1
            and offset <= num_drafts[row]
            and state.token_ids[row, position] == sampled[place - 1]
        )
        if is_kept:
            last_rows[place] = row
            if offset:
                last_rows[last] = -1
            last = place
        else:
            tokens[place] = MISSING if offset > num_drafts[row] else REJECTED
    return last_rows, tokens
