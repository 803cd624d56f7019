"""Attention of long chunks by `hopper_prefill`, in the place of the lesson's kernel."""

from __future__ import annotations

import torch

from m5_kernels.decoder.attention import ChunkAttention, PagedPrefill
from m5_kernels.kernels.step_metadata import StepMetadata

from .prefill_tiles import prefill_tiles, runs_on_hopper

MIN_TOKENS = 3073
"""Of a step. In smaller ones few programs would have work, and `paged_prefill` makes more of them;
and none is part of a graph, for which tiles would have to be sorted in each replay."""


def attention_of_chunks(
    device: torch.device, dtype: torch.dtype, head_dim: int, block_size: int
) -> ChunkAttention:
    """`HopperChunks` where it knows the GPU and these shapes, else the lesson's."""
    knows_all = runs_on_hopper(device, dtype, head_dim, block_size)
    return HopperChunks() if knows_all else PagedPrefill()


class HopperChunks:
    """Takes the place of `PagedPrefill` where `runs_on_hopper`."""

    def __init__(self) -> None:
        self.of_others = PagedPrefill()

    def prepare(self, metadata: StepMetadata) -> torch.Tensor | None:
        """The tiles of all chunks, in steps that are large enough; else None."""
        m, num_tokens = metadata, len(metadata.input_ids)
        if num_tokens < MIN_TOKENS:
            return None
        return prefill_tiles(
            m.context_lens, m.query_start_loc, m.first_chunk, num_tokens, m.num_chunks
        )

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
        if metadata.chunk_plan is None or window is not None:
            self.of_others(query, key_cache, value_cache, metadata, scale, window, output)
            return
        from .hopper_prefill import hopper_prefill  # Gluon: NVIDIA's GPUs alone

        scale = query.shape[-1] ** -0.5 if scale is None else scale
        hopper_prefill(
            query, key_cache, value_cache, metadata.block_table, metadata.chunk_plan, scale, output
        )
