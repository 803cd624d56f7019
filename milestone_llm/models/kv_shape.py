"""How much KV memory a model needs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class KVShape:
    """What a model keeps of every token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel) -> KVShape:
        """Read it off a model's config."""
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        return cls(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_heads,
            dtype=model.dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of keys and values that one token leaves in all layers together."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


def kv_bytes_per_token(model: PreTrainedModel) -> int | None:
    """Bytes of keys and values of a token; None for a model whose layers differ in shape."""
    try:
        return KVShape.of(model).bytes_per_token
    except Exception:  # a config that has no such fields, or a value for each layer
        return None
