"""Attention of a step over the paged cache: decode rows to one kernel, chunks to the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m5_kernels.kernels.decode_parts import DecodeWorkspace
from m5_kernels.kernels.flash_decode import flash_decode
from m5_kernels.kernels.paged_prefill import paged_prefill

MANY_PLACES = 32
"""From so many on, a request's guesses attend together. Fewer requests are cut into more parts, and
to merge those of several places takes longer than to read the keys and values again."""


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a step stand. Sequences with one new token come first, then chunks.

    positions: int `[num_tokens]`; slot_mapping: int64 `[num_tokens]`, -1 in padding;
    block_table: int32 `[num_seqs, max_blocks]`; context_lens: int32 `[num_seqs]`, 0 in padding;
    query_start_loc: int32 `[num_seqs + 1]`; decode_lens: int32 `[num_seqs]`, context_lens of the
    sequences with one new token, 0 for others; first_chunk: int32 `[1]`, how many those are. None
    but the first num_decodes sequences has one token, and there are at most num_chunks chunks.
    workspace: as in `flash_decode`.
    chunk_tiles: of `prefill_tiles`, where the kernel for Hopper is to attend for the chunks.
    offsets: of the sequences with one new token, as in `flash_decode`, where some are guesses.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    decode_lens: torch.Tensor
    first_chunk: torch.Tensor
    num_decodes: int
    num_chunks: int
    workspace: DecodeWorkspace | None = None
    chunk_tiles: torch.Tensor | None = None
    offsets: torch.Tensor | None = None


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float | None = None,
    window: int | None = None,
    pdl: int = 0,
) -> torch.Tensor:
    """Causal attention for all tokens of a step, whose KV is in the cache already.

    query: `[num_tokens, num_q_heads, head_dim]`; caches: `[num_blocks, block_size, num_kv_heads,
    head_dim]`. Returns `[num_tokens, num_q_heads, head_dim]`; padding tokens of a step with
    chunks get anything. scale, window, pdl: as in `flash_decode`.
    """
    m, n = metadata, metadata.num_decodes
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if n:  # where a chunk's first tokens stand among the first n, they get zeros for the moment
        flash_decode(
            query[:n], key_cache, value_cache, m.block_table[:n], m.decode_lens[:n],
            scale, window, output[:n], m.workspace, pdl, m.offsets if n >= MANY_PLACES else None,
        )  # fmt: skip
    if m.chunk_tiles is not None and window is None:
        from m5_kernels.kernels.hopper_prefill import hopper_prefill  # Gluon: NVIDIA's GPUs alone

        scale = query.shape[-1] ** -0.5 if scale is None else scale
        hopper_prefill(query, key_cache, value_cache, m.block_table, m.chunk_tiles, scale, output)
    elif m.num_chunks:
        paged_prefill(
            query, key_cache, value_cache, m.block_table, m.context_lens, m.query_start_loc,
            scale, window, output, first_seq=m.first_chunk, max_seqs=m.num_chunks,
        )  # fmt: skip
    return output
