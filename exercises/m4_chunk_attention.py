"""M4, tensors: attention of a chunk whose beginning is in the cache.

A prompt is computed in chunks, or its first blocks were found in the prefix cache. So a row has new
tokens `start .. start + num_new - 1`, and keys and values of all tokens before them are in blocks.
Those of the new tokens have been written there, too, before attention begins.

    start 4, num_new 3       keys  0 1 2 3   4 5 6   .       block table [5, 2], block_size 4
    query at position 4            x x x x   x . .   .       the last slot of block 2 is empty:
    query at position 5            x x x x   x x .   .       what an earlier request left there
    query at position 6            x x x x   x x x   .       may be anything, a NaN too

The mask is a triangle at the right: the last query sees all keys. `is_causal=True` of
`scaled_dot_product_attention` puts it at the left: its first query sees the first key only. For a
whole prompt the two are the same, so the mistake shows only when chunks are used.

Several query heads share a key head (GQA): with 4 query heads and 2 key heads, query heads 0 and 1
use key head 0, and query heads 2 and 3 use key head 1.

The test computes a prompt in chunks with your function and compares with the whole prompt at once.

    python -m pytest tests/exercises/test_m4_chunk_attention.py
"""

from __future__ import annotations

import torch


def attend_chunk(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    start: int,
) -> torch.Tensor:
    """Return attention of the new tokens of one request, `[num_new, num_heads, head_dim]`.

    Scores are scaled by `head_dim ** -0.5`.

    Args:
        query: `[num_new, num_heads, head_dim]`, at positions `start` and following.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`; `value_cache` likewise.
        block_table: int64, the request's blocks in the order of its tokens.
        start: number of tokens before the chunk.

    Hint: gather the blocks and cut them to the context. Make the mask from two `torch.arange`, the
    positions of the queries and of the keys. `F.scaled_dot_product_attention` wants heads before
    tokens, takes the mask as `attn_mask`, and knows `enable_gqa=True`.
    """
    raise NotImplementedError
