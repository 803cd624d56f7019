"""Step 5: attention of one query by split and merge (Flash-Decoding, Dao et al., 2023).

A decode step has one query for each sequence and head. One program for it would leave most of a
GPU idle, so the keys are split among several programs. Each does steps 3 and 4 for its share:
online softmax over tiles of scores, and with it a sum of values, weighted:

    scores = tl.sum(keys * q[None, :], 1) * scale      keys, values: tiles [TILE, HEAD_DIM]
    accumulator = accumulator * rescale + tl.sum(weights[:, None] * values, 0)

    10 tokens, 4 splits of 3        | 0 1 2 | 3 4 5 | 6 7 8 | 9 |
    each leaves                     output, normalised: accumulator / row_sum      [HEAD_DIM]
                                    log-sum-exp: row_max + log(row_sum)            one number

A part's share in the whole is exp(log-sum-exp), so the second kernel merges by weights
exp(lse - the largest lse), divided by their sum.

A split may get no token at all (5 tokens in 4 splits of 2). It leaves zeros and -inf: a part with
no share. Where no split has a token, the output is zeros.

    python -m exercises.build triton 5
"""

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
    raise NotImplementedError(
        "write the body of _split_kernel: the first loop of step 3, with an accumulator "
        "tl.zeros([HEAD_DIM], dtype=tl.float32) beside row_sum. Then delete this `raise`."
    )
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
    # Loop over tiles of tokens begin .. end - 1; mask those from `end` on: the next split has them.


def merge(partial_output: torch.Tensor, partial_lse: torch.Tensor, output: torch.Tensor) -> None:
    """Make one output of the parts, for each sequence.

    Args:
        partial_output: `[num_seqs, num_splits, head_dim]`, contiguous.
        partial_lse: `[num_seqs, num_splits]`; -inf for a part of no tokens.
        output: `[num_seqs, head_dim]`.
    """
    raise NotImplementedError(
        "write the body of _merge_kernel: one program for each sequence; the parts fit into one "
        "tile. Then delete this `raise`."
    )
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
    # Load the log-sum-exps and outputs of this sequence's parts, weigh, add up, store.
