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
    kv_head = head // (NUM_HEADS // NUM_KV_HEADS)
    dims, offsets = tl.arange(0, HEAD_DIM), tl.arange(0, BLOCK_SIZE)
    context_len = tl.load(context_lens + seq)
    row_max = -float("inf")
    row_sum = 0.0
    accumulator = tl.zeros([HEAD_DIM], dtype=tl.float32)
    for index in range(0, tl.cdiv(context_len, BLOCK_SIZE)):
        block = tl.load(block_table + seq * table_stride + index).to(tl.int64)
        is_real = index * BLOCK_SIZE + offsets < context_len
        rows = ((block * BLOCK_SIZE + offsets) * NUM_KV_HEADS + kv_head) * HEAD_DIM
        tile = rows[:, None] + dims[None, :]
        keys = tl.load(key_cache + tile, mask=is_real[:, None], other=0.0).to(tl.float32)
        scores = tl.where(is_real, tl.sum(keys * q[None, :], 1) * scale, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        weights = tl.exp(scores - new_max)
        rescale = tl.exp(row_max - new_max)
        values = tl.load(value_cache + tile, mask=is_real[:, None], other=0.0).to(tl.float32)
        accumulator = accumulator * rescale + tl.sum(weights[:, None] * values, 0)
        row_sum = row_sum * rescale + tl.sum(weights, 0)
        row_max = new_max
    result = accumulator / tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(output + place, result.to(output.dtype.element_ty))
