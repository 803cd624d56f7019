"""M5, Triton: attention of one new token a sequence, over blocks that lie anywhere.

This is PagedAttention in its first form: one program for each sequence and query head. It reads the
query once, walks through the sequence's block table, and takes in one block after another with an
online softmax. Nothing is gathered, and no score is ever stored.

    program (seq 1, head 0)     block_table[1] = [1, 4, 3]     context_len 9, BLOCK_SIZE 4

        row_max, row_sum, accumulator  =  -inf, 0, zeros
        block 1   tokens 0..3     scores -> rescale what is there -> add weights and values
        block 4   tokens 4..7     likewise
        block 3   token  8        likewise; tokens 9..11 are not there: mask them
        output = accumulator / row_sum

Write the body of `_paged_decode_kernel`, some twenty lines, and delete the `raise` in
`paged_decode`. The arithmetic is that of `add_tile` in docs/questions/flash_decode_by_hand.py.
The twin, to compare with, is `flash_decode_torch` in m5_kernels/kernels/flash_decode.py.

Without a GPU the kernel runs under Triton's interpreter: the test sees to it. `print` and
`breakpoint()` work there (`python -m pytest -s ...`). With a GPU it is compiled, and the test
prints how long it takes.

    python -m pytest tests/exercises/test_m5_paged_decode.py
"""

from __future__ import annotations

import torch

from m5_kernels.kernels.backend import tl, triton


def paged_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
) -> torch.Tensor:
    """Attention of each sequence's newest token, `[num_seqs, num_heads, head_dim]`.

    All tensors are contiguous; block_size and head_dim are powers of two.

    Args:
        query: `[num_seqs, num_heads, head_dim]`.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`; `value_cache` likewise.
        block_table: int32 `[num_seqs, max_blocks]`.
        context_lens: int32 `[num_seqs]`, the newest token included; 0 for a row of padding, which
            gets zeros.

    Hint: if this is your first kernel, read docs/compute.md before. Begin with the first block
    alone, then write the loop. A query head's kv_head is head // (NUM_HEADS // NUM_KV_HEADS).
    Element d of a key lies at ((block * BLOCK_SIZE + offset) * NUM_KV_HEADS + kv_head) * HEAD_DIM
    + d. Load a block as a tile `[BLOCK_SIZE, HEAD_DIM]`, from `offsets[:, None]` and
    `dims[None, :]`. Its scores are `tl.sum(keys * q[None, :], 1)`.
    """
    raise NotImplementedError  # delete this line
    num_seqs, num_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    output = torch.empty_like(query)
    _paged_decode_kernel[(num_seqs, num_heads)](
        query, key_cache, value_cache, block_table, context_lens, output,
        head_dim**-0.5, block_table.stride(0),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
    )  # fmt: skip
    return output


@triton.jit
def _paged_decode_kernel(
    query, key_cache, value_cache, block_table, context_lens, output,
    scale, table_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    seq, head = tl.program_id(0), tl.program_id(1)
    place = (seq * NUM_HEADS + head) * HEAD_DIM + tl.arange(0, HEAD_DIM)
    q = tl.load(query + place).to(tl.float32)
    # Here comes your loop over the blocks. So far the query itself is the output.
    tl.store(output + place, q.to(output.dtype.element_ty))
