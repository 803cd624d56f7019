"""Where a decoder's weights lie, and its sums are made: here, on one GPU."""

from __future__ import annotations

import contextlib

import torch

from m5_kernels.kernels.rms_norm import add_rms_norm, embed_rms_norm

from .config import DecoderConfig


class OneGPU:
    """The whole of every layer, and nobody to wait for.

    What a decoder and its steps ask is asked here, since it is answered in another way where a
    layer is cut over several GPUs.
    """

    def own_part(self, whole: DecoderConfig) -> DecoderConfig:
        """The shape of what is computed here."""
        return whole

    def slices(self, name: str, whole: DecoderConfig, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Which part of a checkpoint's weight is kept here; `shape` is that of the whole weight."""
        return (slice(None),) * len(shape)

    def vocab_rows(self, vocab_size: int) -> int:
        """Rows of the embedding, and of the LM head."""
        return vocab_size

    def embed(
        self,
        input_ids: torch.Tensor,
        embedding: torch.Tensor,
        norm: torch.Tensor,
        epsilon: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of the embedding, which begin the residual stream, and their norm."""
        residual = embedding.new_empty(len(input_ids), embedding.shape[1])
        return residual, embed_rms_norm(input_ids, embedding, residual, norm, epsilon)

    def add_norm(
        self, part: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, epsilon: float
    ) -> torch.Tensor:
        """`residual += part`, and the norm of that. `part` may be overwritten."""
        return add_rms_norm(part, residual, weight, epsilon)

    def all_logits(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """Logits `[num_rows, vocab_size]` of those that were computed here."""
        return logits

    def smallest(self, number: int) -> int:
        """What all can have of something, if this one can have `number`."""
        return number

    def lack_of_memory_suppressed(self) -> contextlib.AbstractContextManager[None]:
        """Within, a step may find too little memory, and is then not computed."""
        return contextlib.suppress(torch.OutOfMemoryError)
