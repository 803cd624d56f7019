"""Flash-Decoding with grouped heads over a paged cache: half of the way to M5's kernel.

The course's kernel (exercises/build/triton/paged.py) has one head, and its tile is a block. Here
the query heads that share a KV head are the rows of one matrix product, so keys and values are read
once for all of them. A tile is any number of tokens. Each sequence is cut into equal splits, and a
second launch merges them. m5_kernels/kernels/flash_decode.py is the other half of the way.

    TRITON_INTERPRET=1 python -m docs.questions.m5_small_flash_decode
"""

from __future__ import annotations

import sys

import torch

from m5_kernels.kernels.flash_decode import flash_decode_torch
from m5_kernels.kernels.triton_or_twin import INTERPRETED, next_power_of_2, tl, triton
from m5_kernels.tools.measure import PagedBatch

FLOOR = tl.constexpr(-1e30)
"""Below every score: the maximum of no scores. With -inf, a difference of two would be NaN."""


@triton.jit
def _split_kernel(
    query, key_cache, value_cache, block_table, context_lens, partial_output, partial_lse,
    table_stride, scale,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    # Which sequence, which KV head, and which of its splits is this program's?
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_kv_heads, num_splits = tl.num_programs(1), tl.num_programs(2)
    context_len = tl.load(context_lens + seq)
    num_tiles = tl.cdiv(context_len, TILE)
    tiles_of_a_split = tl.cdiv(num_tiles, num_splits)
    begin = split * tiles_of_a_split
    end = tl.minimum(begin + tiles_of_a_split, num_tiles)

    # The queries of GROUP heads: a matrix [ROWS, HEAD_DIM]. A product has at least 16 rows; those
    # beyond GROUP are zeros, and are never stored.
    rows, dims = tl.arange(0, ROWS), tl.arange(0, HEAD_DIM)
    is_row = rows < GROUP
    heads = (seq * num_kv_heads + kv_head) * GROUP + rows  # numbers of (sequence, query head)
    q = tl.load(query + heads[:, None] * HEAD_DIM + dims[None, :], is_row[:, None], other=0.0)

    # Online softmax, as in the course, but with a maximum and a sum for each row.
    row_max = tl.full([ROWS], FLOOR, dtype=tl.float32)
    row_sum = tl.zeros([ROWS], dtype=tl.float32)
    accumulator = tl.zeros([ROWS, HEAD_DIM], dtype=tl.float32)
    for tile in range(begin, end):
        # Token -> block of the table -> slot of the cache. A tile may begin in the middle of a
        # block, and reach over several: each token asks for its own.
        tokens = tile * TILE + tl.arange(0, TILE)
        is_token = tokens < context_len
        table = block_table + seq * table_stride
        blocks = tl.load(table + tokens // BLOCK_SIZE, is_token, other=0)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        places = (slots * num_kv_heads + kv_head)[:, None] * HEAD_DIM + dims[None, :]
        keys = tl.load(key_cache + places, is_token[:, None], other=0.0)
        values = tl.load(value_cache + places, is_token[:, None], other=0.0)

        # All scores of the tile in one product: [ROWS, HEAD_DIM] @ [HEAD_DIM, TILE].
        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * scale
        scores = tl.where(is_token[None, :], scores, -float("inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        rescale, weights = tl.exp(row_max - new_max), tl.exp(scores - new_max[:, None])
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        row_max = new_max
        accumulator = accumulator * rescale[:, None]
        accumulator += tl.dot(weights.to(values.dtype), values, input_precision="ieee")

    # What this split leaves: for each head an output, and the logarithm of how much it counts. A
    # split without a token leaves zeros and FLOOR, and counts for nothing.
    parts = heads * num_splits + split
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    result = accumulator / row_sum[:, None]
    tl.store(partial_output + parts[:, None] * HEAD_DIM + dims[None, :], result, is_row[:, None])
    tl.store(partial_lse + parts, row_max + tl.log(row_sum), is_row)


@triton.jit
def _merge_kernel(
    partial_output, partial_lse, output, num_splits,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):  # fmt: skip
    # One program for each (sequence, query head): a part counts as exp(its log-sum-exp). For a row
    # of padding all parts are zeros.
    head, splits, dims = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, HEAD_DIM)
    parts, is_split = head * num_splits + splits, splits < num_splits
    lse = tl.load(partial_lse + parts, is_split, other=-float("inf"))
    weights = tl.exp(lse - tl.max(lse, 0))
    places = parts[:, None] * HEAD_DIM + dims[None, :]
    outputs = tl.load(partial_output + places, is_split[:, None], other=0.0)
    result = tl.sum(weights[:, None] * outputs, 0) / tl.sum(weights, 0)
    tl.store(output + head * HEAD_DIM + dims, result.to(output.dtype.element_ty))


def small_flash_decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    context_lens: torch.Tensor,
    num_splits: int = 4,
    tile: int = 32,
) -> torch.Tensor:
    """Compute attention of each sequence's newest token; arguments as those of `flash_decode`, all
    contiguous, head_dim and tile powers of two of at least 16."""
    num_seqs, num_q_heads, head_dim = query.shape
    _, block_size, num_kv_heads, _ = key_cache.shape
    group, output = num_q_heads // num_kv_heads, torch.empty_like(query)
    partial_lse = query.new_empty(num_seqs * num_q_heads, num_splits, dtype=torch.float32)
    partial_output = partial_lse.new_empty(*partial_lse.shape, head_dim)
    _split_kernel[(num_seqs, num_kv_heads, num_splits)](
        query, key_cache, value_cache, block_table, context_lens, partial_output, partial_lse,
        block_table.stride(0), head_dim**-0.5,
        GROUP=group,
        ROWS=max(16, next_power_of_2(group)),
        HEAD_DIM=head_dim,
        BLOCK_SIZE=block_size,
        TILE=tile,
    )  # fmt: skip
    _merge_kernel[(num_seqs * num_q_heads,)](
        partial_output, partial_lse, output, num_splits,
        HEAD_DIM=head_dim,
        SPLITS=next_power_of_2(num_splits),
    )  # fmt: skip
    return output


def main() -> None:
    """Run three sequences, and compare with the twin of M5's kernel."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not INTERPRETED:
        sys.exit(
            "torch.cuda finds no GPU. With TRITON_INTERPRET=1 before the command it runs without."
        )
    lens, num_splits, tile = [5, 100, 33], 4, 16
    batch = PagedBatch.random(lens, [1, 1, 1], 6, 2, 32, 16, torch.float32, device)
    output = small_flash_decode(*batch.decode_inputs, num_splits, tile)
    twin = flash_decode_torch(*batch.decode_inputs)
    print(f"query {list(output.shape)}, 2 KV heads: {len(lens) * 2 * num_splits} programs")
    for length in lens:
        num_tiles = triton.cdiv(length, tile)
        share = triton.cdiv(num_tiles, num_splits)
        tiles = [max(0, min(share, num_tiles - share * split)) for split in range(num_splits)]
        print(f"{length:4} tokens: each split's tiles {tiles}")
    print("as M5's twin computes:", torch.allclose(output, twin, atol=1e-5))


if __name__ == "__main__":
    main()
