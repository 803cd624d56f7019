"""Attention of long chunks by `hopper_prefill`, in the place of the lesson's kernel."""

from __future__ import annotations

import torch

from m5_kernels.decoder.attention import Attention, AttentionLayer, AttentionShape, PagedPrefill
from m5_kernels.kernels.launch import Launch
from m5_kernels.kernels.step_metadata import StepMetadata

from .hopper_prefill_tiles import prefill_tiles

MIN_TOKENS = 3073
"""Fewest tokens of a step. In smaller steps few programs would have work, and `paged_prefill` has
more of them. Also, no such step is part of a graph, where tiles would have to be sorted in each
replay."""


def hopper_attention(
    shape: AttentionShape, max_num_seqs: int, dtype: torch.dtype, device: torch.device
) -> Attention:
    """Return the lesson's attention with `HopperChunks`. Only where `runs_on_hopper` is true."""
    return Attention(shape, max_num_seqs, dtype, device, HopperChunks())


class HopperChunks:
    """Takes the place of `PagedPrefill`, where `runs_on_hopper` is true."""

    def __init__(self) -> None:
        self.fallback = PagedPrefill()

    def prepare(self, metadata: StepMetadata, launch: Launch) -> torch.Tensor | None:
        """Return the tiles of all chunks if the step is large enough, else None."""
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
        layer: AttentionLayer,
        output: torch.Tensor,
        launch: Launch,
    ) -> None:
        """Compute causal attention of each chunk over its context."""
        has_all = layer.window is None and layer.sinks is None
        if metadata.chunk_plan is None or not has_all:
            self.fallback(query, key_cache, value_cache, metadata, layer, output, launch)
            return
        from .hopper_prefill import hopper_prefill  # Gluon: NVIDIA's GPUs alone

        scale = query.shape[-1] ** -0.5 if layer.scale is None else layer.scale
        hopper_prefill(
            query, key_cache, value_cache, metadata.block_table, metadata.chunk_plan, scale, output,
            launch=launch,
        )  # fmt: skip
