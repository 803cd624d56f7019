"""Attention of a step over the paged cache: decode rows to one kernel, chunks to the other."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch

from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode
from m5_kernels.kernels.paged_prefill import paged_prefill
from m5_kernels.kernels.step_metadata import StepMetadata


class ChunkAttention(Protocol):
    """Attends for the chunks of a step: `PagedPrefill`, or what takes its place."""

    def prepare(self, metadata: StepMetadata) -> torch.Tensor | None:
        """What all layers of a step need, made once on the device: `metadata.chunk_plan`."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        scale: float | None,
        window: int | None,
        output: torch.Tensor,
    ) -> None:
        """Fill the rows of `output` that belong to chunks; arguments as `Attention` takes them."""


class PagedPrefill:
    """The lesson's kernel for chunks."""

    def prepare(self, metadata: StepMetadata) -> torch.Tensor | None:
        """Nothing: each program finds its tile by itself."""
        return None

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        scale: float | None,
        window: int | None,
        output: torch.Tensor,
    ) -> None:
        """Causal attention of each chunk over its context."""
        m = metadata
        paged_prefill(
            query, key_cache, value_cache, m.block_table, m.context_lens, m.query_start_loc,
            scale, window, output, first_seq=m.first_chunk, max_seqs=m.num_chunks,
        )  # fmt: skip


class Attention:
    """Causal attention for all tokens of a step, whose KV is in the cache already.

    Args:
        workspace: as in `flash_decode`, required inside a CUDA graph.
        chunks: the kernel for chunks.
    """

    def __init__(
        self, workspace: DecodeWorkspace | None = None, chunks: ChunkAttention | None = None
    ) -> None:
        self.workspace = workspace
        self.chunks = chunks or PagedPrefill()

    def prepare(self, metadata: StepMetadata) -> StepMetadata:
        """With what all layers of a step need, made once on the device."""
        if not metadata.num_chunks:
            return metadata
        return replace(metadata, chunk_plan=self.chunks.prepare(metadata))

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        scale: float | None = None,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attend for decode rows, then for chunks.

        query: `[num_tokens, num_q_heads, head_dim]`; caches: `[num_blocks, block_size,
        num_kv_heads, head_dim]`. scale: of the scores, `head_dim ** -0.5` if None. window: tokens
        that a query sees, itself included. Returns `[num_tokens, num_q_heads, head_dim]`; padding
        tokens of a step with chunks get anything.
        """
        m, n = metadata, metadata.num_decodes
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if n:  # where a chunk's first tokens stand among the first n, they get zeros for the moment
            flash_decode(
                query[:n], key_cache, value_cache, m.block_table[:n], m.decode_lens[:n],
                scale, window, output[:n], self.workspace,
            )  # fmt: skip
        if m.num_chunks:
            self.chunks(query, key_cache, value_cache, m, scale, window, output)
        return output
