"""Attention of a step over the paged cache: decode rows to one kernel, chunks to the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode
from m5_kernels.kernels.paged_prefill import paged_prefill


@dataclass(frozen=True)
class AttentionMetadata:
    """Where the tokens of a step stand. Sequences with one new token come first.

    positions: int `[num_tokens]`; slot_mapping: int64 `[num_tokens]`, -1 in padding;
    block_table: int32 `[num_seqs, max_blocks]`; context_lens: int32 `[num_seqs]`, 0 in padding;
    query_start_loc: int32 `[num_seqs + 1]`. The first num_decode_seqs sequences have one token
    each, which are the first num_decode_seqs tokens.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor
    num_decode_seqs: int
    workspace: DecodeWorkspace | None = None


def attend(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float | None = None,
    window: int | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Causal attention for all tokens of a step, whose KV is in the cache already.

    query: `[num_tokens, num_q_heads, head_dim]`; caches: `[num_blocks, block_size, num_kv_heads,
    head_dim]`. Returns `[num_tokens, num_q_heads, head_dim]`; padding tokens of a step with
    chunks get anything. pdl: as in `flash_decode`.
    """
    num_decode = metadata.num_decode_seqs
    table, lens = metadata.block_table, metadata.context_lens
    output = torch.empty_like(query, memory_format=torch.contiguous_format)
    if num_decode:
        flash_decode(
            query[:num_decode], key_cache, value_cache, table[:num_decode], lens[:num_decode],
            scale, window, output[:num_decode], metadata.workspace, pdl,
        )  # fmt: skip
    if num_decode < len(lens):
        starts = metadata.query_start_loc[num_decode:]
        paged_prefill(
            query, key_cache, value_cache, table[num_decode:], lens[num_decode:], starts,
            scale, window, output,
        )  # fmt: skip
    return output
