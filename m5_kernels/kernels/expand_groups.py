"""Block tables and slots of a step in each group of layers, where KV has several lifetimes.

`expand_step` fills them for the first group. Everything else of a step is the same in all groups.

Program (i, j) of `expand_groups` fills, for the j-th further group, row i of the block table and
the i-th block of slots.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .launch import Launch
from .step_metadata import StepMetadata
from .triton_or_twin import ceil_div, lanes_for, tl, triton


class GroupTables:
    """Slots and block tables of a step in every group of layers but the first.

    Args:
        rows: block tables of the rows of state, int32 `[num_groups, num_rows, max_blocks]`.
        whole: buffers of the first group, for the largest step.
    """

    def __init__(self, rows: torch.Tensor, whole: StepMetadata, block_size: int) -> None:
        num_further = len(rows) - 1
        self.rows, self.block_size = rows, block_size
        self.slots = whole.slot_mapping.new_zeros(num_further, len(whole.slot_mapping))
        self.tables = whole.block_table.new_zeros(num_further, *whole.block_table.shape)

    def expand(
        self, metadata: StepMetadata, row_ids: torch.Tensor, launch: Launch
    ) -> tuple[StepMetadata, ...]:
        """Return the metadata of a step in each group, in one launch.

        metadata: the step in the first group, filled.
        row_ids: int32 `[num_seqs]`, the rows of its sequences.
        """
        num_tokens, num_seqs = len(metadata.slot_mapping), len(row_ids)
        slots, tables = self.slots[:, :num_tokens], self.tables[:, :num_seqs]
        expand_groups(self.rows, row_ids, metadata, slots, tables, self.block_size, launch)
        further = (
            replace(metadata, slot_mapping=slots[i], block_table=tables[i], group=i + 1)
            for i in range(len(slots))
        )
        return metadata, *further


def expand_groups(
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    metadata: StepMetadata,
    slots: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
    launch: Launch,
) -> None:
    """Fill slots, int64 `[num_groups - 1, num_tokens]`, and block tables, int32
    `[num_groups - 1, num_seqs, max_blocks]`, of a step.

    rows, row_ids, metadata: as `GroupTables` takes them. A token without a slot in `metadata` has
    none in any group.
    """
    if not launch.runs_triton(row_ids):
        expand_groups_torch(rows, row_ids, metadata, slots, tables, block_size)
        return
    num_seqs, num_tokens, block = len(row_ids), slots.shape[1], 128
    grid = max(num_seqs, ceil_div(num_tokens, block)), len(slots)
    launch.kernel(_expand_groups_kernel, grid)(
        rows, row_ids, metadata.positions, metadata.slot_mapping, metadata.context_lens,
        metadata.query_start_loc, slots, tables,
        num_seqs, num_tokens,
        rows.stride(0), rows.stride(1), slots.stride(0), tables.stride(0), tables.stride(1),
        NUM_SEQS_PAD=lanes_for(num_seqs) if metadata.num_chunks else 0,
        BLOCK_SIZE=block_size,
        BLOCK=block,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_seqs", "num_tokens"])
def _expand_groups_kernel(
    rows, row_ids, positions, slot_mapping, context_lens, query_start_loc, slots, tables,
    num_seqs, num_tokens,
    group_stride, row_stride, slots_stride, tables_stride, table_stride,
    NUM_SEQS_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    rows += (group + 1) * group_stride
    slots += group * slots_stride
    tables += group * tables_stride

    # Per sequence.
    seq = tl.program_id(0)
    if seq < num_seqs:
        row = tl.load(row_ids + seq).to(tl.int64)
        context_len = tl.load(context_lens + seq)  # 0 in padding
        for start in range(0, (context_len + BLOCK_SIZE - 1) // BLOCK_SIZE, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            mask = columns * BLOCK_SIZE < context_len
            blocks = tl.load(rows + row * row_stride + columns, mask=mask)
            tl.store(tables + seq * table_stride + columns, blocks, mask=mask)

    # Per token. Without chunks, each sequence has one.
    if tl.program_id(0) * BLOCK < num_tokens:
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_new = tl.load(slot_mapping + tokens, mask=tokens < num_tokens, other=-1) >= 0
        token_seqs = tokens
        if NUM_SEQS_PAD > 0:
            seqs = tl.arange(0, NUM_SEQS_PAD)
            ends = tl.load(query_start_loc + 1 + seqs, mask=seqs < num_seqs, other=num_tokens)
            token_seqs = tl.sum((ends[None, :] <= tokens[:, None]).to(tl.int32), 1)
        token_rows = tl.load(row_ids + token_seqs, mask=is_new, other=0).to(tl.int64)
        position = tl.load(positions + tokens, mask=is_new, other=0)
        table = rows + token_rows * row_stride + position // BLOCK_SIZE
        blocks = tl.load(table, mask=is_new, other=0).to(tl.int64)
        new_slots = tl.where(is_new, blocks * BLOCK_SIZE + position % BLOCK_SIZE, -1)
        tl.store(slots + tokens, new_slots, mask=tokens < num_tokens)


def expand_groups_torch(
    rows: torch.Tensor,
    row_ids: torch.Tensor,
    metadata: StepMetadata,
    slots: torch.Tensor,
    tables: torch.Tensor,
    block_size: int,
) -> None:
    """Specify `expand_groups`, one sequence after another."""
    slots.fill_(-1)
    starts = metadata.query_start_loc.tolist() if metadata.num_chunks else range(len(row_ids) + 1)
    for seq, row in enumerate(row_ids.tolist()):
        num_blocks = ceil_div(int(metadata.context_lens[seq]), block_size)
        tables[:, seq, :num_blocks] = rows[1:, row, :num_blocks]
        for token in range(starts[seq], starts[seq + 1]):
            if metadata.slot_mapping[token] >= 0:
                index, offset = divmod(int(metadata.positions[token]), block_size)
                slots[:, token] = rows[1:, row, index].long() * block_size + offset
