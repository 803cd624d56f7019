"""Attention of a step on a CPU: keys and values are gathered from their blocks, torch attends.

torch's attention needs the keys of a sequence in one piece. Copying them there costs little
compared with reading them, since the copy is still in the CPU's caches when it is read again.
Decode rows of similar length attend in one call, with a mask for the shorter ones. A chunk attends
alone.

The query heads that share a KV head are rows of one small product: `[kv_heads, group, head_dim]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from m5_kernels.decoder.attention import AttentionLayer, AttentionShape
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.models.attend import attend

SIMILAR = 1.25
"""Rows attend together if the longest has at most so many times the tokens of the shortest."""


@dataclass(frozen=True)
class AttentionBatch:
    """Sequences that attend in one call."""

    tokens: torch.Tensor | None
    """int64 `[num_seqs * query_len]`: indices of their tokens in the step. None: all of them."""
    query_len: int
    slots: torch.Tensor | int
    """int64 `[num_seqs * context_len]`: the slots of their keys and values. The first slot if they
    are contiguous and in order, so that no copy is needed."""
    shape: tuple[int, int, int, int]
    """`[num_seqs, num_kv_heads, context_len, head_dim]`, with the context length of the longest
    sequence. The rest of a shorter one repeats its last token, which the mask hides."""
    mask: torch.Tensor | None
    """bool, for a chunk `[query_len, context_len]`, for decode rows
    `[num_seqs, 1, 1, context_len]`: which tokens a query sees. None: all before it, and itself."""

    @cached_property
    def strides(self) -> tuple[int, int, int, int]:
        """How far numbers of keys or values are apart, in each dimension of `shape`."""
        _, num_kv_heads, context_len, head_dim = self.shape
        token = num_kv_heads * head_dim
        return context_len * token, head_dim, token, 1

    def gather(self, cache: torch.Tensor) -> torch.Tensor:
        """Return keys or values from a cache `[num_blocks, block_size, num_kv_heads, head_dim]`."""
        if isinstance(self.slots, int):
            first = cache.storage_offset() + self.slots * self.strides[2]
            return cache.as_strided(self.shape, self.strides, first)
        gathered = cache.flatten(0, 1).index_select(0, self.slots)
        return gathered.as_strided(self.shape, self.strides)


class CPUAttention:
    """Takes the place of `decoder.attention.Attention`. Needs none of its arguments."""

    def __init__(
        self, shape: AttentionShape, max_num_seqs: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._planned: dict[int, tuple[StepMetadata, dict[int | None, list[AttentionBatch]]]] = {}
        """By group of layers: the last step, and its batches by window. Most layers have the
        same."""

    def prepare(self, metadata: StepMetadata, launch: Launch) -> StepMetadata:
        """Return the metadata. Each window's batches are planned when its first layer asks."""
        return metadata

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        layer: AttentionLayer,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Attend for all tokens of a step. See `AttentionBackend`."""
        group, window = metadata.group, layer.window
        if group not in self._planned or self._planned[group][0] is not metadata:
            self._planned[group] = metadata, {}
        by_window = self._planned[group][1]
        if window not in by_window:
            by_window[window] = plan_batches(metadata, key_cache.shape, window)
        batches = by_window[window]
        if len(batches) == 1 and batches[0].tokens is None:
            return attend_batch(query, key_cache, value_cache, batches[0], layer)
        output = query.new_zeros(query.shape)
        for batch in batches:
            assert batch.tokens is not None
            own = query.index_select(0, batch.tokens)
            own = attend_batch(own, key_cache, value_cache, batch, layer)
            output.index_copy_(0, batch.tokens, own)
        return output


def attend_batch(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    batch: AttentionBatch,
    layer: AttentionLayer,
) -> torch.Tensor:
    """Return attention of a batch's tokens, `[num_tokens, num_q_heads, head_dim]` as queries."""
    keys, values = batch.gather(key_cache), batch.gather(value_cache)
    if batch.query_len == 1:
        rows = query.view(len(query), batch.shape[1], -1, query.shape[2])
        output = attend(rows, keys, values, batch.mask, scaling=layer.scale, sinks=layer.sinks)
        return output.flatten(1, 2)
    rows = query.unflatten(0, (-1, batch.query_len)).transpose(1, 2)
    output = attend(
        rows, keys, values, batch.mask, scaling=layer.scale, is_causal=batch.mask is None,
        enable_gqa=True, sinks=layer.sinks,
    )  # fmt: skip
    return output.transpose(1, 2).flatten(0, 1)


def plan_batches(
    metadata: StepMetadata, cache_shape: torch.Size, window: int | None
) -> list[AttentionBatch]:
    """Return batches of sequences that attend together, with the slots of their KV.

    cache_shape: `[num_blocks, block_size, num_kv_heads, head_dim]`.
    """
    m = metadata
    decode_lens = m.decode_lens[: m.num_decodes].tolist()
    rows = [seq for seq, context_len in enumerate(decode_lens) if context_len]
    batches = []
    if m.num_chunks:
        starts, lens = m.query_start_loc.tolist(), m.context_lens.tolist()
        for seq in range(int(m.first_chunk), len(lens)):
            if starts[seq] < starts[seq + 1]:
                tokens = torch.arange(starts[seq], starts[seq + 1])
                batches.append(batch_of_chunk(m, seq, tokens, lens[seq], cache_shape, window))
    seen = {seq: min(window or decode_lens[seq], decode_lens[seq]) for seq in rows}
    rows.sort(key=seen.__getitem__, reverse=True)
    while rows:
        longest = seen[rows[0]]
        group = sorted(seq for seq in rows if seen[seq] * SIMILAR >= longest)
        rows = rows[len(group) :]
        first_tokens = [decode_lens[seq] - seen[seq] for seq in group]
        slots = slots_of(metadata, group, first_tokens, longest, cache_shape[1])
        shape = len(group), cache_shape[2], longest, cache_shape[3]
        mask = None
        own_lens = torch.tensor([seen[seq] for seq in group])
        if own_lens.amin() < longest:
            mask = (torch.arange(longest) < own_lens[:, None])[:, None, None]
        in_order = group == list(range(len(m.input_ids)))
        batches.append(
            AttentionBatch(None if in_order else torch.tensor(group), 1, slots, shape, mask)
        )
    return batches


def batch_of_chunk(
    metadata: StepMetadata,
    seq: int,
    tokens: torch.Tensor,
    context_len: int,
    cache_shape: torch.Size,
    window: int | None,
) -> AttentionBatch:
    """Return the batch of a chunk. Its tokens are the last of its context."""
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
    slots = slots_of(metadata, [seq], [first], context_len - first, cache_shape[1])
    shape = 1, cache_shape[2], context_len - first, cache_shape[3]
    return AttentionBatch(tokens, query_len, slots, shape, mask)


def slots_of(
    metadata: StepMetadata, seqs: list[int], first_tokens: list[int], length: int, block_size: int
) -> torch.Tensor | int:
    """Return slots of `length` tokens of each sequence. A shorter one repeats its last token.

    If they are contiguous and in order, the first of them is returned.
    """
    last = metadata.context_lens[seqs, None].long() - 1
    places = torch.tensor(first_tokens)[:, None] + torch.arange(length)
    places = torch.minimum(places, last)
    blocks = metadata.block_table[seqs].long().gather(1, places // block_size)
    slots = (blocks * block_size + places % block_size).flatten()
    first = int(slots[0])
    if torch.equal(slots, torch.arange(first, first + len(slots))):  # blocks are contiguous
        return first
    return slots
