"""Selective batching (Orca, section 3, S2): only attention looks across tokens, so it alone is
taken request by request; all else sees one flat `[1, num_tokens]` batch.

    tokens   | d0 d1 d2 | p p p p p p | q q q q |     one row of hidden states, no padding
               decode     prefill      prefill
               \\ one batched, masked    \\ each prefill row attends to itself, causally:
                 call over regions       one call a row, once in a request's life

Decode rows are many and short, so they share one call: queries are laid out by region and meet the
regions' keys in place. The price is that every region is read up to the longest context among them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from milestone_llm.core.plan import ScheduledRequest

from .region_cache import RegionCache

NAME = "region_attention"


@dataclass
class AttentionMetadata:
    """What attention must know of a step; made once, used by every layer.

    Tokens are ordered decode rows first: token i of the decode rows belongs to `decode_regions[i]`.
    """

    cache: RegionCache
    token_regions: torch.Tensor
    """Region of each token, `[num_tokens]`."""
    token_positions: torch.Tensor
    """Position of each token in its request, `[num_tokens]`."""
    decode_regions: torch.Tensor
    """`[num_decode_rows]`"""
    decode_context_lens: torch.Tensor
    """Tokens each decode row attends to, itself included, `[num_decode_rows]`."""
    max_decode_context_len: int
    is_aligned: bool
    """Whether decode row i lives in region i, so that queries need not be moved."""
    is_masked: bool
    """Whether decode contexts differ in length, so that the shorter ones need a mask."""
    prefill_spans: list[tuple[int, int]]
    """First and last+1 token index of each prefill row."""
    num_regions_in_use: int
    """Highest region of a decode row, plus 1."""
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, rows: list[ScheduledRequest], cache: RegionCache) -> AttentionMetadata:
        """Metadata of a step whose rows are ordered decode first."""
        device = cache.keys[0].device
        decode = [row for row in rows if row.phase == "decode"]
        decode_regions = [row.blocks[0] for row in decode]
        context_lens = [row.end for row in decode]
        is_aligned = decode_regions == list(range(len(decode)))
        regions = [row.blocks[0] for row in rows for _ in range(row.num_new_tokens)]
        positions = [position for row in rows for position in range(row.start, row.end)]
        spans, first = [], len(decode)
        for row in rows[len(decode) :]:
            spans.append((first, first + row.num_new_tokens))
            first += row.num_new_tokens
        return cls(
            cache=cache,
            token_regions=torch.tensor(regions, device=device),
            token_positions=torch.tensor(positions, device=device),
            decode_regions=torch.tensor(decode_regions, device=device),
            decode_context_lens=torch.tensor(context_lens, device=device),
            max_decode_context_len=max(context_lens, default=0),
            is_aligned=is_aligned,
            is_masked=not is_aligned or len(set(context_lens)) > 1,
            prefill_spans=spans,
            num_regions_in_use=max(decode_regions, default=-1) + 1,
        )

    @property
    def is_dense(self) -> bool:
        """Whether most regions in use decode, so that reading them all in place is cheapest."""
        return 2 * len(self.decode_regions) >= self.num_regions_in_use

    def decode_mask(self, sliding_window: int | None) -> torch.Tensor | None:
        """Which token may see which: `[num_regions or num_decode_rows, 1, 1, max_context]`, bool.

        None where everybody may see all: a request alone, or some that are equally long.
        """
        is_windowed = sliding_window is not None and sliding_window < self.max_decode_context_len
        if not self.is_masked and not is_windowed:
            return None
        if sliding_window not in self._masks:
            position = torch.arange(self.max_decode_context_len, device=self.token_regions.device)
            end = self.decode_context_lens[:, None]
            mask = position < end
            if sliding_window is not None:
                mask &= position >= end - sliding_window
            if self.is_dense:
                mask_of_region = mask.new_zeros(self.num_regions_in_use, len(position))
                mask_of_region[:, 0] = True  # a region that does not decode needs something to see
                mask_of_region[self.decode_regions] = mask
                mask = mask_of_region
            self._masks[sliding_window] = mask[:, None, None, :]
        return self._masks[sliding_window]


def region_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attention_metadata: AttentionMetadata,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The attention function that Hugging Face's modules call, once a layer.

    Args:
        query: `[1, num_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, not repeated for GQA; `value` likewise.
        attention_mask: None, always: the metadata says which token sees which.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no attention weights.
    """
    meta, layer = attention_metadata, int(module.layer_idx)  # type: ignore[arg-type]
    meta.cache.write(
        layer,
        meta.token_regions,
        meta.token_positions,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
    )
    outputs = []  # [num_tokens, num_heads, head_dim] in all: decode rows, then each prefill row
    num_decode = len(meta.decode_regions)
    if num_decode:
        decode_query = query[0, :, :num_decode].transpose(0, 1)
        outputs.append(_decode(decode_query, meta, layer, scaling, sliding_window))
    for first, end in meta.prefill_spans:
        own = slice(first, end)
        outputs.append(
            causal_attention(
                query[:, :, own], key[:, :, own], value[:, :, own], scaling, sliding_window
            )
        )
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _decode(
    query: torch.Tensor,
    meta: AttentionMetadata,
    layer: int,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One query a row against its region: `[num_decode_rows, num_heads, head_dim]` in and out."""
    num_rows, num_heads, head_dim = query.shape
    keys, values = meta.cache.keys[layer], meta.cache.values[layer]
    num_kv_heads = keys.shape[1]
    # The query heads that share a KV head (GQA) stand where a sequence of queries would.
    query = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    regions: slice | torch.Tensor = meta.decode_regions
    if meta.is_dense:  # read regions where they lie: a slice is a view, an index tensor copies
        regions = slice(0, meta.num_regions_in_use)
    if meta.is_dense and not meta.is_aligned:
        query_of_region = query.new_zeros(meta.num_regions_in_use, *query.shape[1:])
        query_of_region[meta.decode_regions] = query
        query = query_of_region
    context = slice(0, meta.max_decode_context_len)
    output = F.scaled_dot_product_attention(
        query,
        keys[regions, :, context],
        values[regions, :, context],
        meta.decode_mask(sliding_window),
        scale=scaling,
    )
    if meta.is_dense and not meta.is_aligned:
        output = output[meta.decode_regions]
    return output.reshape(num_rows, num_heads, head_dim)


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
) -> torch.Tensor:
    """A row whose queries are the last of its keys: `[num_queries, num_heads, head_dim]`.

    Args:
        query: `[1, num_heads, num_queries, head_dim]`.
        key: `[1, num_kv_heads, context_len, head_dim]`; `value` likewise.
    """
    num_queries, context_len = query.shape[2], key.shape[2]
    is_square = num_queries == context_len
    mask = None
    if not is_square or (sliding_window is not None and context_len > sliding_window):
        position = torch.arange(context_len, device=query.device)
        query_position = position[context_len - num_queries :, None]
        mask = position <= query_position
        if sliding_window is not None:
            mask &= position > query_position - sliding_window
    output = F.scaled_dot_product_attention(
        query, key, value, mask, is_causal=mask is None, scale=scaling, enable_gqa=True
    )
    return output[0].transpose(0, 1)


AttentionInterface.register(NAME, region_attention)
