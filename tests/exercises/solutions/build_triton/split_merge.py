"""A solution of step 5 of the Triton course."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def attend(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    output: torch.Tensor,
    num_splits: int,
    tile: int,
) -> None:
    """Attention of one query: both kernels, one after the other.

    Args:
        query: `[head_dim]`, a power of two; output likewise.
        keys: `[num_tokens, head_dim]`, contiguous; values likewise.
    """
    partial_output = query.new_empty(1, num_splits, len(query))
    partial_lse = query.new_empty(1, num_splits)
    split(query, keys, values, partial_output[0], partial_lse[0], tile)
    merge(partial_output, partial_lse, output[None])


def split(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    tile: int,
) -> None:
    """Write each split's output `[num_splits, head_dim]` and log-sum-exp `[num_splits]`."""
    num_splits, head_dim = partial_output.shape
    _split_kernel[(num_splits,)](
        query, keys, values, partial_output, partial_lse, len(keys), head_dim**-0.5,
        HEAD_DIM=head_dim,
        TILE=tile,
    )  # fmt: skip


@triton.jit
def _split_kernel(
    query, keys, values, partial_output, partial_lse, num_tokens, scale,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)
    tokens_of_a_split = tl.cdiv(num_tokens, tl.num_programs(0))
    begin = part * tokens_of_a_split
    end = tl.minimum(begin + tokens_of_a_split, num_tokens)
    dims = tl.arange(0, HEAD_DIM)
    q = tl.load(query + dims)
    row_max, row_sum = -1.0e30, 0.0
    accumulator = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for start in range(begin, end, TILE):
        tokens = start + tl.arange(0, TILE)
        mask = tokens < end
        places = tokens[:, None] * HEAD_DIM + dims[None, :]
        key_tile = tl.load(keys + places, mask=mask[:, None], other=0.0)
        value_tile = tl.load(values + places, mask=mask[:, None], other=0.0)
        scores = tl.where(mask, tl.sum(key_tile * q[None, :], 1) * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        rescale, weights = tl.exp(row_max - new_max), tl.exp(scores - new_max)
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * value_tile, 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    tl.store(partial_lse + part, row_max + tl.log(row_sum))  # -inf without a token: log(0)
    result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(partial_output + part * HEAD_DIM + dims, result)


def merge(partial_output: torch.Tensor, partial_lse: torch.Tensor, output: torch.Tensor) -> None:
    """Make one output of the parts, for each sequence.

    Args:
        partial_output: `[num_seqs, num_splits, head_dim]`, contiguous.
        partial_lse: `[num_seqs, num_splits]`; -inf for a part of no tokens.
        output: `[num_seqs, head_dim]`.
    """
    num_seqs, num_splits, head_dim = partial_output.shape
    _merge_kernel[(num_seqs,)](
        partial_output, partial_lse, output, num_splits,
        HEAD_DIM=head_dim,
        TILE=triton.next_power_of_2(num_splits),
    )  # fmt: skip


@triton.jit
def _merge_kernel(
    partial_output, partial_lse, output, num_splits,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0)
    parts = tl.arange(0, TILE)
    dims = tl.arange(0, HEAD_DIM)
    mask = parts < num_splits
    lse = tl.load(partial_lse + seq * num_splits + parts, mask=mask, other=-float("inf"))
    largest = tl.maximum(tl.max(lse, 0), -1.0e30)  # finite, even if no part has a token
    weights = tl.exp(lse - largest)
    places = (seq * num_splits + parts)[:, None] * HEAD_DIM + dims[None, :]
    outputs = tl.load(partial_output + places, mask=mask[:, None], other=0.0)
    total = tl.sum(weights, 0)
    result = tl.sum(weights[:, None] * outputs, 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + seq * HEAD_DIM + dims, result)
