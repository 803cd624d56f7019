"""A solution of step 6 of the Triton course."""

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
    num_blocks = tl.cdiv(context_len, BLOCK_SIZE)
    blocks_of_a_split = tl.cdiv(num_blocks, num_splits)
    begin = part * blocks_of_a_split
    end = tl.minimum(begin + blocks_of_a_split, num_blocks)
    dims, offsets = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    q = tl.load(query + seq * HEAD_DIM + dims)
    row_max, row_sum = -1.0e30, 0.0
    accumulator = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for index in range(begin, end):
        block = tl.load(block_table + seq * table_stride + index)
        mask = index * BLOCK_SIZE + offsets < context_len
        places = (block * BLOCK_SIZE + offsets)[:, None] * HEAD_DIM + dims[None, :]
        keys = tl.load(key_cache + places, mask=mask[:, None], other=0.0)
        values = tl.load(value_cache + places, mask=mask[:, None], other=0.0)
        scores = tl.where(mask, tl.sum(keys * q[None, :], 1) * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        rescale, weights = tl.exp(row_max - new_max), tl.exp(scores - new_max)
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * values, 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    place = seq * num_splits + part
    tl.store(partial_lse + place, row_max + tl.log(row_sum))  # -inf without a token: log(0)
    result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(partial_output + place * HEAD_DIM + dims, result)
