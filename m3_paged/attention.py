"""Attention that reads KV through block tables (PagedAttention, SOSP '23, section 4.1).

Plain torch has no kernel that follows a table, so the blocks are first gathered side by side and
then attended to as if they had been contiguous:

    table of row 0   [7, 2, 5]   ->  | block 7 | block 2 | block 5 |   mask: the first
    table of row 1   [1, 0, 0]   ->  | block 1 |  (0)    |  (0)    |   context_len positions
                                      padded with block 0, masked out

That copy of the whole context, at every step and layer, is the price. M5's kernel reads the blocks
where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from m1_single.plan import ScheduledRequest
from m2_batching.attention import causal_attention

from .block_cache import BlockCache

NAME = "paged_attention"


@dataclass(frozen=True)
class PrefillRow:
    """A row of several new tokens, or of a prompt's first."""

    tokens: slice
    """Which of the step's tokens are its own."""
    start: int
    """Tokens whose KV was in the cache before this step."""
    end: int
    block_table: torch.Tensor
    """`[1, num_blocks]`"""


@dataclass
class AttentionMetadata:
    """What attention must know of a step; made once, used by every layer.

    Tokens are ordered decode rows first, one token each.
    """

    cache: BlockCache
    slot_mapping: torch.Tensor
    """Slot to which each token's KV goes, `[num_tokens]`."""
    block_tables: torch.Tensor
    """Of the decode rows, padded with block 0, `[num_decode_rows, max_blocks]`."""
    context_lens: torch.Tensor
    """Tokens each decode row attends to, itself included, `[num_decode_rows]`."""
    prefill_rows: list[PrefillRow]
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def build(cls, rows: list[ScheduledRequest], cache: BlockCache) -> AttentionMetadata:
        """Metadata of a step whose rows are ordered decode first."""
        device, size = cache.device, cache.block_size
        decode = [row for row in rows if row.phase == "decode"]
        slot_mapping = [
            row.blocks[position // size] * size + position % size
            for row in rows
            for position in range(row.start, row.end)
        ]
        max_blocks = max((len(row.blocks) for row in decode), default=0)
        tables = [row.blocks + [0] * (max_blocks - len(row.blocks)) for row in decode]
        prefill_rows, first = [], len(decode)
        for row in rows[len(decode) :]:
            tokens = slice(first, first + row.num_new_tokens)
            table = torch.tensor([row.blocks], device=device)
            prefill_rows.append(PrefillRow(tokens, row.start, row.end, table))
            first = tokens.stop
        return cls(
            cache=cache,
            slot_mapping=torch.tensor(slot_mapping, device=device),
            block_tables=torch.tensor(tables, dtype=torch.long, device=device),
            context_lens=torch.tensor([row.end for row in decode], device=device),
            prefill_rows=prefill_rows,
        )

    def decode_mask(self, sliding_window: int | None) -> torch.Tensor:
        """Which gathered positions a decode row may see: `[num_rows, 1, 1, max_context]`, bool."""
        if sliding_window not in self._masks:
            max_context = self.block_tables.shape[1] * self.cache.block_size
            position = torch.arange(max_context, device=self.block_tables.device)
            end = self.context_lens[:, None]
            mask = position < end
            if sliding_window is not None:
                mask &= position >= end - sliding_window
            self._masks[sliding_window] = mask[:, None, None, :]
        return self._masks[sliding_window]


def paged_attention(
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
        attention_mask: None, always: the metadata says who sees whom.

    Returns:
        `[1, num_tokens, num_heads, head_dim]`, and no attention weights.
    """
    meta, layer = attention_metadata, int(module.layer_idx)  # type: ignore[arg-type]
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    meta.cache.write(layer, meta.slot_mapping, new_keys, new_values)
    output = torch.empty_like(query[0].transpose(0, 1))  # [num_tokens, num_heads, head_dim]
    num_decode = len(meta.block_tables)
    if num_decode:
        decode_query = query[0, :, :num_decode].transpose(0, 1)
        output[:num_decode] = paged_decode(decode_query, meta, layer, scaling, sliding_window)
    for row in meta.prefill_rows:
        own = row.tokens
        keys, values = key[:, :, own], value[:, :, own]
        if row.start > 0:  # what came before is in the cache, and so by now are the new tokens
            keys, values = meta.cache.gather(layer, row.block_table)
            keys, values = keys[:, :, : row.end], values[:, :, : row.end]
        output[own] = causal_attention(query[:, :, own], keys, values, scaling, sliding_window)
    return output[None], None


def paged_decode(
    query: torch.Tensor,
    meta: AttentionMetadata,
    layer: int,
    scaling: float,
    sliding_window: int | None,
) -> torch.Tensor:
    """One query a row against its blocks: `[num_decode_rows, num_heads, head_dim]` in and out."""
    num_rows, num_heads, head_dim = query.shape
    keys, values = meta.cache.gather(layer, meta.block_tables)
    num_kv_heads = keys.shape[1]
    # The query heads that share a KV head (GQA) stand where a sequence of queries would.
    query = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = meta.decode_mask(sliding_window)
    output = F.scaled_dot_product_attention(query, keys, values, mask, scale=scaling)
    return output.reshape(num_rows, num_heads, head_dim)


AttentionInterface.register(NAME, paged_attention)
