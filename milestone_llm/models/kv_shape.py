"""The KV memory that a model needs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class KVShape:
    """Shape of the keys and values that a model keeps for every token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    """Numbers of a key."""
    value_dim: int
    """Numbers of a value; with latent attention (MLA) they are fewer than those of a key."""
    dtype: torch.dtype

    @classmethod
    def of(cls, model: PreTrainedModel, dtype: str | None = None) -> KVShape:
        """Return the shape in a model's config.

        dtype: the name of torch's dtype for keys and values; None: the model's.
        """
        config = model.config.get_text_config()
        num_heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        head_dim = getattr(config, "qk_head_dim", None) or head_dim
        return cls(
            num_layers=config.num_hidden_layers,
            num_kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
            head_dim=head_dim,
            value_dim=getattr(config, "v_head_dim", None) or head_dim,
            dtype=getattr(torch, dtype) if dtype else model.dtype,
        )

    @property
    def bytes_per_token(self) -> int:
        """Bytes of the keys and values of one token, in all layers together."""
        numbers = self.num_layers * self.num_kv_heads * (self.head_dim + self.value_dim)
        return numbers * self.dtype.itemsize


def kv_bytes_per_token(
    model: PreTrainedModel, dtype: str | None = None, num_layers: int | None = None
) -> int | None:
    """Return the bytes of keys and values of a token; None if the layers have different shapes.

    Args:
        num_layers: layers whose keys and values are counted; None: all.
    """
    try:
        shape = KVShape.of(model, dtype)
        return replace(shape, num_layers=num_layers or shape.num_layers).bytes_per_token
    except Exception:  # the config lacks these fields, or has one value for each layer
        return None
