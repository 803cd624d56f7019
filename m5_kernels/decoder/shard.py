"""The part of a model's weights that is kept here: all of it."""

from __future__ import annotations

from .config import DecoderConfig


class Shard:
    """Keeps every weight as a whole. With several GPUs, another object keeps a part of each."""

    def own_config(self, whole: DecoderConfig) -> DecoderConfig:
        """Return the shape of what is computed here. Its vocabulary is that of the whole model."""
        return whole

    def slices(self, name: str, whole: DecoderConfig, shape: tuple[int, ...]) -> tuple[slice, ...]:
        """Return the part of a checkpoint's weight that is kept here.

        name: the weight's name at Hugging Face; shape: of the whole weight.
        """
        return (slice(None),) * len(shape)

    def vocab_rows(self, vocab_size: int) -> int:
        """Return the number of rows that are kept of the embedding, and of the LM head."""
        return vocab_size
