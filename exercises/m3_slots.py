"""M3, tensors: write tokens to their slots, and read them back through the block tables.

KV memory is one tensor of blocks, here of keys only, `[num_blocks, block_size, num_heads,
head_dim]`. The token at position p of a request lies in block `table[p // block_size]`, at offset
`p % block_size`. Its slot is block * block_size + offset: its place if all blocks lay end to end.

    block_tables            starts  num_new     slots, block_size 4
    [[ 7,  2, -1],          5       2           position 5, 6 of row 0:  block 2 -> 9, 10
     [ 1,  4,  3]]          8       1           position 8 of row 1:     block 3 -> 12

Tables have different lengths, and -1 fills them up. Two functions are to be written:

1. `slot_mapping`: the slot of every new token of a step, all rows end to end.
2. `gather`: the keys of every row side by side, as attention in plain torch wants them, and a mask
   that says which of them are real. Where the mask is False, the keys must be 0. Other requests'
   keys must not be there, not even masked: if one of them holds a NaN, then 0 * NaN is NaN.

Work on whole tensors: no loop over tokens. Mind that -1 is a valid index in torch.

    python -m pytest tests/exercises/test_m3_slots.py
"""

from __future__ import annotations

import torch


def slot_mapping(
    block_tables: torch.Tensor, starts: torch.Tensor, num_new: torch.Tensor, block_size: int
) -> torch.Tensor:
    """Slots of all new tokens, int64 `[num_tokens]`.

    Args:
        block_tables: int64 `[num_rows, max_blocks]`, filled up with -1.
        starts: int64 `[num_rows]`, position of each row's first new token.
        num_new: int64 `[num_rows]`, new tokens of each row, at least 1.

    Hint: make two tensors of one entry a token: its row (`repeat_interleave`) and its position. A
    token's position is its row's start, plus its place in the step, less the row's first place in
    the step (`cumsum`). Then the drawing above is one line of indexing.
    """
    raise NotImplementedError


def gather(
    cache: torch.Tensor, block_tables: torch.Tensor, context_lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys `[num_rows, max_blocks * block_size, num_heads, head_dim]`, and a bool mask of its first
    two dimensions.

    Args:
        cache: `[num_blocks, block_size, num_heads, head_dim]`.
        block_tables: int64 `[num_rows, max_blocks]`, filled up with -1.
        context_lens: int64 `[num_rows]`, tokens of each row that are in the cache.

    Hint: `cache[block_tables]` is nearly all of it, once -1 is replaced by some valid block. Then
    `flatten(1, 2)`, and zeros (`masked_fill` or `torch.where`, not a product) where nothing is.
    """
    raise NotImplementedError
