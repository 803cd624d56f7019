"""torch's attention, also of layers with sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    scaling: float | None,
    is_causal: bool = False,
    enable_gqa: bool = False,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `F.scaled_dot_product_attention`, whose softmax may have a column of sinks.

    A sink is a number of a query head that the model has learned. It is one more score, without a
    value: a query need not give all its weight to tokens.

        scores       s0   s1   s2   sink       softmax over all four
        weights      w0   w1   w2    w3        output = w0 * v0 + w1 * v1 + w2 * v2

    Args:
        query: `[num_rows, num_heads, num_queries, head_dim]`, or with the heads that share a KV
            head in place of queries: `[num_rows, num_kv_heads, group, head_dim]`.
        mask: as torch takes it.
        sinks: `[num_query_heads]`
    """
    if sinks is not None:
        num_keys, per_query = key.shape[2], query.shape[:3]
        if is_causal:
            mask = mask_of_last(query.shape[2], num_keys, query.device)
        scores = query.new_zeros(1)
        if mask is not None and mask.dtype == torch.bool:
            scores = query.new_zeros(mask.shape).masked_fill_(~mask, float("-inf"))
        elif mask is not None:
            scores = mask
        column = sinks.to(query.dtype).view(1, query.shape[1], -1, 1)
        mask = torch.cat([scores.expand(*per_query, num_keys), column.expand(*per_query, 1)], -1)
        # A key of zeros has no score but the mask's; a value of zeros adds nothing.
        key, value = (F.pad(each, (0, 0, 0, 1)) for each in (key, value))
        is_causal = False
    return F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=is_causal, scale=scaling, enable_gqa=enable_gqa
    )


def mask_of_last(num_queries: int, num_keys: int, device: torch.device) -> torch.Tensor:
    """Return which key each query may see, bool `[num_queries, num_keys]`: the queries are at the
    positions of the last keys."""
    position = torch.arange(num_keys, device=device)
    return position <= position[num_keys - num_queries :, None]
