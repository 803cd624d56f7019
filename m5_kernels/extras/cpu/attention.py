"""Attention of a step on a CPU: keys and values are gathered from their blocks, torch attends.

torch's attention wants the keys of a sequence in one piece. To copy them there costs little beside
reading them: the copy lies in the caches when it is read again. Decode rows of similar length
attend in one call, the shorter ones masked; a chunk attends alone.

The query heads that share a KV head are rows of one small product: `[kv_heads, group, head_dim]`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

from m5_kernels.kernels.step_metadata import StepMetadata

SIMILAR = 1.25
"""Rows attend together if the longest has at most so many times the tokens of the shortest."""


class Part(NamedTuple):
    """Sequences that attend in one call."""

    tokens: torch.Tensor | None
    """int64 `[num_seqs * query_len]`: their places in the step; None: all, in their order."""
    query_len: int
    slots: torch.Tensor | slice
    """int64 `[num_seqs * context_len]`: where in the cache their keys and values lie. A slice if
    they lie there as they are wanted, and need no copy."""
    context_len: int
    """Of the longest. A shorter one's last token stands in what is left, which the mask hides."""
    mask: torch.Tensor | None
    """bool, of a chunk `[query_len, context_len]`, of decode rows `[num_seqs, 1, 1, context_len]`:
    what a query sees; None: all that come before it, and itself."""


class CPUAttention:
    """Takes the place of `decoder.attention.Attention`."""

    def __init__(self) -> None:
        self._metadata: StepMetadata | None = None
        self._parts: dict[int | None, list[Part]] = {}
        """Of that step, by window: most layers have the same."""

    def prepare(self, metadata: StepMetadata) -> StepMetadata:
        """Nothing is made before the first layer asks."""
        return metadata

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Causal attention for all tokens of a step; see `Attention`."""
        if metadata is not self._metadata:
            self._metadata, self._parts = metadata, {}
        if window not in self._parts:
            self._parts[window] = plan(metadata, key_cache.shape[1], window)
        parts = self._parts[window]
        if len(parts) == 1 and parts[0].tokens is None:
            return attend(query, key_cache, value_cache, parts[0], scale)
        output = query.new_zeros(query.shape)
        for part in parts:
            assert part.tokens is not None
            own = query.index_select(0, part.tokens)
            output.index_copy_(0, part.tokens, attend(own, key_cache, value_cache, part, scale))
        return output


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    part: Part,
    scale: float | None,
) -> torch.Tensor:
    """Attention of a part's tokens, `[num_tokens, num_q_heads, head_dim]` as their queries."""
    num_kv_heads, head_dim = key_cache.shape[2:]
    keys, values = (
        gather(cache.view(-1, num_kv_heads, head_dim), part.slots)
        .view(-1, part.context_len, num_kv_heads, head_dim)
        .transpose(1, 2)
        for cache in (key_cache, value_cache)
    )
    if part.query_len == 1:
        rows = query.unflatten(1, (num_kv_heads, -1))
        output = F.scaled_dot_product_attention(rows, keys, values, part.mask, scale=scale)
        return output.flatten(1, 2)
    rows = query.unflatten(0, (-1, part.query_len)).transpose(1, 2)
    output = F.scaled_dot_product_attention(
        rows, keys, values, part.mask, is_causal=part.mask is None, scale=scale, enable_gqa=True
    )
    return output.transpose(1, 2).flatten(0, 1)


def gather(cache: torch.Tensor, slots: torch.Tensor | slice) -> torch.Tensor:
    """Keys or values of these slots, of a cache `[num_slots, num_kv_heads, head_dim]`."""
    return cache[slots] if isinstance(slots, slice) else cache.index_select(0, slots)


def plan(metadata: StepMetadata, block_size: int, window: int | None) -> list[Part]:
    """Which sequences attend together, and where their keys and values lie."""
    m = metadata
    decode_lens = m.decode_lens[: m.num_decodes].tolist()
    rows = [seq for seq, context_len in enumerate(decode_lens) if context_len]
    parts = []
    if m.num_chunks:
        starts, lens = m.query_start_loc.tolist(), m.context_lens.tolist()
        for seq in range(int(m.first_chunk), len(lens)):
            if starts[seq] < starts[seq + 1]:
                tokens = torch.arange(starts[seq], starts[seq + 1])
                parts.append(part_of_chunk(m, seq, tokens, lens[seq], block_size, window))
    seen = {seq: min(window or decode_lens[seq], decode_lens[seq]) for seq in rows}
    rows.sort(key=seen.__getitem__, reverse=True)
    while rows:
        longest = seen[rows[0]]
        group = sorted(seq for seq in rows if seen[seq] * SIMILAR >= longest)
        rows = rows[len(group) :]
        first_tokens = [decode_lens[seq] - seen[seq] for seq in group]
        slots = slots_of(metadata, group, first_tokens, longest, block_size)
        mask = None
        own_lens = torch.tensor([seen[seq] for seq in group])
        if own_lens.amin() < longest:
            mask = (torch.arange(longest) < own_lens[:, None])[:, None, None]
        in_order = group == list(range(len(m.input_ids)))
        parts.append(Part(None if in_order else torch.tensor(group), 1, slots, longest, mask))
    return parts


def part_of_chunk(
    metadata: StepMetadata,
    seq: int,
    tokens: torch.Tensor,
    context_len: int,
    block_size: int,
    window: int | None,
) -> Part:
    """A chunk, whose tokens are the last of its context."""
    query_len, first = len(tokens), 0
    if window is not None:
        first = max(0, context_len - query_len - window + 1)
    mask = None
    if query_len < context_len or (window or context_len) < context_len:
        places = torch.arange(first, context_len)
        queries = torch.arange(context_len - query_len, context_len)[:, None]
        mask = places <= queries
        if window is not None:
            mask &= places > queries - window
    slots = slots_of(metadata, [seq], [first], context_len - first, block_size)
    return Part(tokens, query_len, slots, context_len - first, mask)


def slots_of(
    metadata: StepMetadata, seqs: list[int], first_tokens: list[int], length: int, block_size: int
) -> torch.Tensor | slice:
    """Slots of so many tokens of each sequence; the last one again where it has not so many."""
    last = metadata.context_lens[seqs, None].long() - 1
    places = torch.tensor(first_tokens)[:, None] + torch.arange(length)
    places = torch.minimum(places, last)
    blocks = metadata.block_table[seqs].long().gather(1, places // block_size)
    slots = (blocks * block_size + places % block_size).flatten()
    first = int(slots[0])
    if torch.equal(slots, torch.arange(first, first + len(slots))):  # blocks are neighbours
        return slice(first, first + len(slots))
    return slots
