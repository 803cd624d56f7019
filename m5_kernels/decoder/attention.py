"""Attention of a step over the paged cache: decode rows to one kernel, chunks to the other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from transformers import PreTrainedModel

from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode
from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.paged_prefill import paged_prefill
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.models.kv_shape import KVShape


class AttentionShape(NamedTuple):
    """Number of heads of a layer, and of elements of a head."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, model: PreTrainedModel) -> AttentionShape:
        """Read the shape from a model's config."""
        shape = KVShape.of(model)
        num_q_heads = model.config.get_text_config(decoder=True).num_attention_heads
        return cls(num_q_heads, shape.num_kv_heads, shape.head_dim)


@dataclass(frozen=True)
class AttentionLayer:
    """What attention must know of a layer."""

    index: int
    window: int | None = None
    """Number of tokens that a query sees, itself included; None: all before it."""
    scale: float | None = None
    """Factor of the scores; None: `head_dim ** -0.5`."""
    sinks: torch.Tensor | None = field(default=None, compare=False)
    """One more score of each query head, without a value, `[num_q_heads]`: see `attend`."""


class AttentionBackend(Protocol):
    """Attends for all tokens of a step: `Attention`, or what takes its place."""

    def prepare(self, metadata: StepMetadata, launch: Launch) -> StepMetadata:
        """Return the metadata with what every layer of the step needs, computed once."""

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        layer: AttentionLayer,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Return causal attention of all tokens. Their KV is in the cache already.

        query: `[num_tokens, num_q_heads, head_dim]`.
        caches: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        Returns `[num_tokens, num_q_heads, head_dim]`. In a step with chunks, the output of padding
        tokens is undefined.
        """


class ChunkAttention(Protocol):
    """Attends for the chunks of a step: `PagedPrefill`, or what takes its place."""

    def prepare(self, metadata: StepMetadata, launch: Launch) -> torch.Tensor | None:
        """Return what every layer of the step needs, computed once: `metadata.chunk_plan`."""

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
        """Fill the rows of `output` that belong to chunks. Arguments as in `AttentionBackend`."""


class PagedPrefill:
    """The lesson's kernel for chunks."""

    def prepare(self, metadata: StepMetadata, launch: Launch) -> torch.Tensor | None:
        """Return None: each program finds its tile by itself."""
        return None

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
        m = metadata
        paged_prefill(
            query, key_cache, value_cache, m.block_table, m.context_lens, m.query_start_loc,
            layer.scale, layer.window, output,
            first_seq=m.first_chunk, max_seqs=m.num_chunks, sinks=layer.sinks, launch=launch,
        )  # fmt: skip


class Attention:
    """The lesson's attention: `flash_decode` for decode rows, `paged_prefill` for chunks.

    Args:
        shape: heads of every layer.
        max_num_seqs: most sequences of a step.
        dtype: dtype of queries, keys and values.
        chunks: attends for chunks.
    """

    def __init__(
        self,
        shape: AttentionShape,
        max_num_seqs: int,
        dtype: torch.dtype,
        device: torch.device,
        chunks: ChunkAttention | None = None,
    ) -> None:
        self.chunks = chunks or PagedPrefill()
        self.workspace: DecodeWorkspace | None = None
        if device.type == "cuda":  # a CUDA graph needs the same memory in each replay
            self.workspace = DecodeWorkspace.allocate(max_num_seqs, *shape, dtype, device)

    def prepare(self, metadata: StepMetadata, launch: Launch) -> StepMetadata:
        """Return the metadata with the plan of the step's chunks."""
        if not metadata.num_chunks:
            return metadata
        return replace(metadata, chunk_plan=self.chunks.prepare(metadata, launch))

    def __call__(
        self,
        query: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        metadata: StepMetadata,
        layer: AttentionLayer,
        launch: Launch = PLAIN,
    ) -> torch.Tensor:
        """Attend for decode rows, then for chunks. See `AttentionBackend`."""
        m, n = metadata, metadata.num_decodes
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        if n:  # a chunk's tokens may be among the first n: they get zeros, overwritten below
            flash_decode(
                query[:n], key_cache, value_cache, m.block_table[:n], m.decode_lens[:n],
                layer.scale, layer.window, output[:n], self.workspace, layer.sinks,
                launch=launch,
            )  # fmt: skip
        if m.num_chunks:
            self.chunks(query, key_cache, value_cache, m, layer, output, launch)
        return output
