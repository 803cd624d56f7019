from __future__ import annotations

import torch
import torch.nn.functional as F


def attend_chunk(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    start: int,
) -> torch.Tensor:
    context_len = start + len(query)
    keys = key_cache[block_table].flatten(0, 1)[:context_len]
    values = value_cache[block_table].flatten(0, 1)[:context_len]
    mask = torch.arange(context_len) <= torch.arange(start, context_len)[:, None]
    output = F.scaled_dot_product_attention(
        query.transpose(0, 1)[None],
        keys.transpose(0, 1)[None],
        values.transpose(0, 1)[None],
        attn_mask=mask,
        enable_gqa=True,
    )
    return output[0].transpose(0, 1)
