"""Attention that reads KV through block tables (PagedAttention, SOSP '23, section 4.1).

Plain torch has no kernel that follows a table, so the blocks are first gathered side by side and
then attended to as if they had been contiguous:

    table of row 0   [7, 2, 5]   ->  | block 7 | block 2 | block 5 |   mask: the first
    table of row 1   [1, 4, 1]   ->  | block 1 | block 4 |  (1)    |   context_len positions
                                      padded with its first block, masked out

That copy of the whole context, at every step and layer, is the price. To keep it low, rows of
similar length are taken together, a few at a time. M5's kernel reads the blocks in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from m2_batching.attention import causal_attention
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.models.attend import attend

from .block_cache import BlockCache

NAME = "paged_attention"

MAX_GATHERED_TOKENS = {"cpu": 1024, "cuda": 65536}
"""Positions gathered at a time: on a CPU few enough that they are still in its cache when attention
reads them, on a GPU as many as keep it busy. One row may have more."""


@dataclass
class DecodeGroup:
    """Rows of one new token each whose contexts are of similar length."""

    rows: torch.Tensor
    """Index of each row's token among the step's tokens, `[num_rows]`."""
    block_tables: torch.Tensor
    """Block tables, padded with the row's first block, `[num_rows, max_blocks]`."""
    context_lens: torch.Tensor
    """Tokens each row attends to, itself included, `[num_rows]`."""
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    def mask(self, block_size: int, sliding_window: int | None, dtype: torch.dtype) -> torch.Tensor:
        """Return 0 for gathered positions that a row may see, -inf for others.

        Returns:
            `[num_rows, 1, 1, max_blocks * block_size]`, made once for all layers.
        """
        if sliding_window not in self._masks:
            max_context = self.block_tables.shape[1] * block_size
            position = torch.arange(max_context, device=self.rows.device)
            end = self.context_lens[:, None]
            is_hidden = position >= end
            if sliding_window is not None:
                is_hidden |= position < end - sliding_window
            mask = torch.zeros(is_hidden.shape, dtype=dtype, device=self.rows.device)
            mask.masked_fill_(is_hidden, float("-inf"))
            self._masks[sliding_window] = mask[:, None, None, :]
        return self._masks[sliding_window]


@dataclass(frozen=True)
class PrefillRow:
    """A row of several new tokens, or of the first token of a prompt."""

    tokens: slice
    """Range of the row's tokens among the step's tokens."""
    start: int
    """Tokens whose KV was in the cache before this step."""
    end: int
    block_table: torch.Tensor
    """`[1, num_blocks]`"""


@dataclass
class AttentionMetadata:
    """A step's data for attention; made once, used by every layer.

    Tokens are ordered decode rows first, one token each.
    """

    cache: BlockCache
    slot_mapping: torch.Tensor
    """Slot to which each token's KV goes, `[num_tokens]`."""
    decode_groups: list[DecodeGroup]
    prefill_rows: list[PrefillRow]

    @classmethod
    def build(cls, rows: list[ScheduledRequest], cache: BlockCache) -> AttentionMetadata:
        """Return the metadata of a step whose rows are ordered decode first."""
        device, size = cache.device, cache.block_size
        decode = [row for row in rows if row.phase == "decode" and row.num_new_tokens == 1]
        slot_mapping = [
            row.blocks[position // size] * size + position % size
            for row in rows
            for position in range(row.start, row.end)
        ]
        prefill_rows, first = [], len(decode)
        for row in rows[len(decode) :]:
            tokens = slice(first, first + row.num_new_tokens)
            table = torch.tensor([row.blocks[: -(-row.end // size)]], device=device)
            prefill_rows.append(PrefillRow(tokens, row.start, row.end, table))
            first = tokens.stop
        return cls(
            cache=cache,
            slot_mapping=torch.tensor(slot_mapping, device=device),
            decode_groups=_decode_groups(decode, cache),
            prefill_rows=prefill_rows,
        )


def _decode_groups(rows: list[ScheduledRequest], cache: BlockCache) -> list[DecodeGroup]:
    """Group decode rows, longest first, as many rows in a group as `MAX_GATHERED_TOKENS` allows.

    one group                 two groups
    a |# # # # # # # # #|     a |# # # # # # # # #|      '#' a block of the row
    b |# # # # # # # # .|     b |# # # # # # # # .|      '.' its first block again, wasted
    c |# # # . . . . . .|     c |# # #|
    d |# # . . . . . . .|     d |# # .|
    """
    max_blocks = MAX_GATHERED_TOKENS.get(cache.device.type, 1024) // cache.block_size
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index].blocks))
    groups, first = [], 0
    while first < len(order):
        width = len(rows[order[first]].blocks)
        own = order[first : first + max(1, max_blocks // width)]
        first += len(own)
        # Pad with a row's own first block: another block may hold a NaN, masked or not.
        tables = [
            blocks + blocks[:1] * (width - len(blocks))
            for blocks in (rows[index].blocks for index in own)
        ]
        groups.append(
            DecodeGroup(
                rows=torch.tensor(own, device=cache.device),
                block_tables=torch.tensor(tables, device=cache.device),
                context_lens=torch.tensor([rows[index].end for index in own], device=cache.device),
            )
        )
    return groups


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
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention. Hugging Face's modules call this function, once a layer.

    Args:
        query: `[1, num_heads, num_tokens, head_dim]`.
        key: `[1, num_kv_heads, num_tokens, head_dim]`, not repeated for GQA; `value` likewise, with
            its `value_dim`.
        attention_mask: None, always: the metadata says which token sees which.
        s_aux: sinks, `[num_heads]`; see `attend`.

    Returns:
        `[1, num_tokens, num_heads, value_dim]`, and no attention weights.
    """
    meta, layer = attention_metadata, int(module.layer_idx)  # type: ignore[arg-type]
    new_keys, new_values = key[0].transpose(0, 1), value[0].transpose(0, 1)
    meta.cache.write(layer, meta.slot_mapping, new_keys, new_values)
    _, num_heads, num_tokens, _ = query.shape
    output = query.new_empty(num_tokens, num_heads, value.shape[-1])
    for group in meta.decode_groups:
        group_query = query[0].index_select(1, group.rows).transpose(0, 1)
        output[group.rows] = paged_decode(
            group_query, group, meta.cache, layer, scaling, sliding_window, s_aux
        )
    for row in meta.prefill_rows:
        own = row.tokens
        keys, values = key[:, :, own], value[:, :, own]
        if row.start > 0:  # earlier tokens are in the cache, and by now the new ones are, too
            keys, values = meta.cache.gather(layer, row.block_table)
            keys, values = keys[:, :, : row.end], values[:, :, : row.end]
        output[own] = causal_attention(
            query[:, :, own], keys, values, scaling, sliding_window, s_aux
        )
    return output[None], None


def paged_decode(
    query: torch.Tensor,
    group: DecodeGroup,
    cache: BlockCache,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with one query a row to its blocks: `[num_rows, num_heads, head_dim]` in,
    `[num_rows, num_heads, value_dim]` out."""
    num_rows, num_heads, head_dim = query.shape
    keys, values = cache.gather(layer, group.block_tables)
    num_kv_heads = keys.shape[1]
    # The query heads that share a KV head (GQA) take the dimension of a sequence of queries.
    query = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    mask = group.mask(cache.block_size, sliding_window, query.dtype)
    output = attend(query, keys, values, mask, scaling=scaling, sinks=sinks)
    return output.reshape(num_rows, num_heads, -1)


AttentionInterface.register(NAME, paged_attention)
