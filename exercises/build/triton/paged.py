"""Step 6: the same for many sequences, whose keys and values are in blocks anywhere.

    block_table[1] = [4, 1, 3]     context_len 9, BLOCK_SIZE 4, three splits
    grid (seq, split)              (1, 0)          (1, 1)          (1, 2)
    block                             4               1               3
    tokens                         0 1 2 3         4 5 6 7         8 . . .

A tile is a block now. Each program takes some of the blocks of its sequence: it asks the block
table where a block is, and goes on as in step 5. Your `merge` from step 5 does the rest.

The slots after the last token of the last block may hold anything, NaN as well, and 0 * NaN is NaN.
So keys and values are loaded with a mask, and scores there are -inf. The table has room for the
longest sequence; beyond a sequence's own blocks its entries mean nothing.

A row of padding has context_len 0, and gets zeros.

    python -m exercises.build triton 6
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .split_merge import merge


def paged_attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    output: torch.Tensor,
    num_splits: int,
) -> None:
    """Attention of each sequence's newest token; one head.

    Args:
        query: `[num_seqs, head_dim]`, contiguous; output likewise.
        key_cache: `[num_blocks, block_size, head_dim]`, contiguous; value_cache likewise.
        block_table: int32 `[num_seqs, max_blocks]`.
        context_lens: int32 `[num_seqs]`, the newest token included.
    """
    raise NotImplementedError(
        "write the body of _paged_split_kernel: _split_kernel of step 5 with a loop over blocks, "
        "begin = split * blocks_of_a_split. Then delete this `raise`."
    )
    num_seqs, head_dim = query.shape
    partial_output = query.new_empty(num_seqs, num_splits, head_dim)
    partial_lse = query.new_empty(num_seqs, num_splits)
    _paged_split_kernel[(num_seqs, num_splits)](
        query, key_cache, value_cache, block_table, context_lens, partial_output, partial_lse,
        block_table.stride(0), head_dim**-0.5,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=key_cache.shape[1],
    )  # fmt: skip
    merge(partial_output, partial_lse, output)


@triton.jit
def _paged_split_kernel(
    query, key_cache, value_cache, block_table, context_lens, partial_output, partial_lse,
    table_stride, scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    seq, part = tl.program_id(0), tl.program_id(1)
    num_splits = tl.num_programs(1)
    context_len = tl.load(context_lens + seq)
    # The sequence has tl.cdiv(context_len, BLOCK_SIZE) blocks. Token `offset` of a block is at
    # key_cache + (block * BLOCK_SIZE + offset) * HEAD_DIM. A part's number is
    # seq * num_splits + part, as `merge` expects it.
