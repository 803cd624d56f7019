"""Selective batching (Orca, section 3, S2): only attention looks across tokens, so only attention
is computed request by request; all else sees one flat `[1, num_tokens]` batch.

    tokens   | d0 d1 d2 | p p p p p p | q q q q |     one row of hidden states, no padding
               decode     prefill      prefill
               \\ one batched, masked    \\ each prefill row attends to itself, causally:
                 call over regions       one call a row, once in a request's life

Decode rows are many and short, so they share one call, with an entry a row: its query, its region's
keys and values, and a mask up to its context's end. The price is that every region is read up to
the longest context among them. `DecodeBatch` lays them out so that little is copied.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface

from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.models.attend import attend, mask_of_last

from .region_cache import RegionCache

NAME = "region_attention"


@dataclass
class DecodeBatch:
    """The entries of the one call for decode rows, in an order that a CPU computes fastest.

    In general each row has an entry, with a copy of its region's keys and values. Where most of the
    regions in use decode, copying costs more than attention. Then every region in use is an entry
    and is read in place: queries move to the entries of their regions, and outputs move back. Rows
    in the regions 0, 1, 2 ... need no moves either, and no mask if their contexts are equally long.
    """

    num_entries: int
    regions: slice | torch.Tensor
    """Region of each entry: a slice is a view, an index tensor copies."""
    entry_of_row: torch.Tensor | None
    """`[num_decode_rows]`; None: row i is entry i."""
    context_lens: torch.Tensor
    """`[num_decode_rows]`"""
    max_context_len: int
    is_uniform: bool
    """Whether every row may see all positions that are read."""
    _masks: dict[int | None, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, regions: list[int], context_lens: list[int], device: torch.device) -> DecodeBatch:
        """Return the batch of rows in these regions, with contexts of these lengths."""
        num_rows, num_in_use = len(regions), max(regions, default=-1) + 1
        row_regions = torch.tensor(regions, device=device)
        is_aligned = regions == list(range(num_rows))
        is_in_place = 2 * num_rows >= num_in_use
        return cls(
            num_entries=num_in_use if is_in_place else num_rows,
            regions=slice(0, num_in_use) if is_in_place else row_regions,
            entry_of_row=row_regions if is_in_place and not is_aligned else None,
            context_lens=torch.tensor(context_lens, device=device),
            max_context_len=max(context_lens, default=0),
            is_uniform=is_aligned and len(set(context_lens)) == 1,
        )

    def to_entries(self, rows: torch.Tensor) -> torch.Tensor:
        """Move each row of `[num_decode_rows, ...]` to its entry; other entries get zeros."""
        if self.entry_of_row is None:
            return rows
        entries = rows.new_zeros(self.num_entries, *rows.shape[1:])
        entries[self.entry_of_row] = rows
        return entries

    def to_rows(self, entries: torch.Tensor) -> torch.Tensor:
        """Move entries back into the order of rows."""
        return entries if self.entry_of_row is None else entries[self.entry_of_row]

    def mask(self, sliding_window: int | None) -> torch.Tensor | None:
        """Return which entry may see which position: `[num_entries, 1, 1, max_context_len]`, bool.

        None if every entry may see all: one request alone, or several that are equally long.
        """
        is_windowed = sliding_window is not None and sliding_window < self.max_context_len
        if self.is_uniform and not is_windowed:
            return None
        if sliding_window not in self._masks:
            position = torch.arange(self.max_context_len, device=self.context_lens.device)
            end = self.context_lens[:, None]
            mask = position < end
            if sliding_window is not None:
                mask &= position >= end - sliding_window
            mask = self.to_entries(mask)
            if self.entry_of_row is not None:
                mask[:, 0] |= ~mask.any(dim=1)  # an entry without a row must also see a position
            self._masks[sliding_window] = mask[:, None, None, :]
        return self._masks[sliding_window]


@dataclass
class AttentionMetadata:
    """A step's data for attention; made once, used by every layer.

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
    decode_batch: DecodeBatch
    """How decode rows are laid out for their call."""
    prefill_spans: list[tuple[int, int]]
    """First and last+1 token index of each prefill row."""

    @classmethod
    def build(cls, rows: list[ScheduledRequest], cache: RegionCache) -> AttentionMetadata:
        """Return the metadata of a step whose rows are ordered decode first."""
        device = cache.keys[0].device
        decode = [row for row in rows if row.phase == "decode"]
        decode_regions = [row.blocks[0] for row in decode]
        decode_batch = DecodeBatch.of(decode_regions, [row.end for row in decode], device)
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
            decode_context_lens=decode_batch.context_lens,
            max_decode_context_len=decode_batch.max_context_len,
            decode_batch=decode_batch,
            prefill_spans=spans,
        )


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
    meta.cache.write(
        layer,
        meta.token_regions,
        meta.token_positions,
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
    )
    outputs = []  # [num_tokens, num_heads, value_dim] in all: decode rows, then each prefill row
    num_decode = len(meta.decode_regions)
    if num_decode:
        decode_query = query[0, :, :num_decode].transpose(0, 1)
        outputs.append(_decode(decode_query, meta, layer, scaling, sliding_window, s_aux))
    for first, end in meta.prefill_spans:
        own = slice(first, end)
        outputs.append(
            causal_attention(
                query[:, :, own], key[:, :, own], value[:, :, own], scaling, sliding_window, s_aux
            )
        )
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[None], None


def _decode(
    query: torch.Tensor,
    meta: AttentionMetadata,
    layer: int,
    scaling: float,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend with one query a row to its region: `[num_decode_rows, num_heads, head_dim]` in,
    `[num_decode_rows, num_heads, value_dim]` out."""
    num_rows, num_heads, head_dim = query.shape
    keys, values = meta.cache.keys[layer], meta.cache.values[layer]
    num_kv_heads = keys.shape[1]
    # The query heads that share a KV head (GQA) take the dimension of a sequence of queries.
    query = query.reshape(num_rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    batch, context = meta.decode_batch, slice(0, meta.max_decode_context_len)
    output = attend(
        batch.to_entries(query),
        keys[batch.regions, :, context],
        values[batch.regions, :, context],
        batch.mask(sliding_window),
        scaling=scaling,
        sinks=sinks,
    )
    return batch.to_rows(output).reshape(num_rows, num_heads, -1)


def causal_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float,
    sliding_window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend causally in a row whose queries are at the positions of its last keys.

    Args:
        query: `[1, num_heads, num_queries, head_dim]`.
        key: `[1, num_kv_heads, context_len, head_dim]`; `value` likewise, with its `value_dim`.

    Returns:
        `[num_queries, num_heads, value_dim]`.
    """
    num_queries, context_len = query.shape[2], key.shape[2]
    is_square = num_queries == context_len
    mask = None
    if not is_square or (sliding_window is not None and context_len > sliding_window):
        mask = mask_of_last(num_queries, context_len, query.device)
        if sliding_window is not None:
            mask = mask.triu(context_len - num_queries - sliding_window + 1)
    output = attend(
        query, key, value, mask, scaling=scaling, is_causal=mask is None, enable_gqa=True,
        sinks=sinks,
    )  # fmt: skip
    return output[0].transpose(0, 1)


AttentionInterface.register(NAME, region_attention)
