"""The KV tensors of layout SLOT: per layer one `[num_slots, num_kv_heads, max_model_len, head_dim]`
pair. A slot is one request's, whole and contiguous, from its first token to its last.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel


@dataclass(frozen=True)
class KVShape:
    """How much a model keeps of every token."""

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


class SlotCache:
    """Keys and values of all layers, written token by token, read slot by slot."""

    def __init__(self, model: PreTrainedModel, num_slots: int, max_model_len: int) -> None:
        shape = KVShape.of(model)
        size = (num_slots, shape.num_kv_heads, max_model_len, shape.head_dim)
        # Zeros, not `empty`: a masked position still enters as 0 * value, and 0 * NaN is NaN.
        self.keys, self.values = (
            [
                torch.zeros(size, dtype=shape.dtype, device=model.device)
                for _ in range(shape.num_layers)
            ]
            for _ in range(2)
        )

    def write(
        self,
        layer: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
    ) -> None:
        """Store new tokens.

        Args:
            slots: slot of each token, `[num_tokens]`.
            positions: position of each token in its request, `[num_tokens]`.
            key: `[num_tokens, num_kv_heads, head_dim]`; `value` likewise.
        """
        self.keys[layer][slots, :, positions] = key
        self.values[layer][slots, :, positions] = value

    def scrub(self) -> None:
        """Put zeros for NaN and infinity: through the mask they would reach the next owner."""
        for tensor in (*self.keys, *self.values):
            tensor.nan_to_num_(0, 0, 0)
