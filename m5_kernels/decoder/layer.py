"""A layer: its weights, some of them merged, its MLP, and how it attends."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from .attention import AttentionLayer
from .config import DecoderConfig
from .linear import LinearMethod, LinearWeight, Weight
from .mlp import MLP
from .weights import StoredWeight, zeros_if

Norm = Any
"""A norm, as the operations take it: the weight of an RMSNorm, `[hidden_size]`, or what takes its
place."""


@dataclass(frozen=True)
class Layer:
    """Weights of a layer. Norms and biases are vectors; QK-norms and biases may be missing.

    cos_sin: fp32 `[max_positions, head_dim]`, a position's cosines, then its sines.
    """

    attention: AttentionLayer
    cos_sin: torch.Tensor
    input_norm: Norm
    qkv: Weight
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Weight
    output_bias: torch.Tensor | None
    post_norm: Norm
    mlp: MLP

    @classmethod
    def create(
        cls,
        index: int,
        config: DecoderConfig,
        cos_sin: torch.Tensor,
        linear: LinearMethod,
        create_mlp: Callable[..., MLP],
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Layer:
        """Return a layer of this shape, not yet filled. What may stay unfilled is zeros.

        cos_sin: of all kinds of layers, as `rope_tables` returns it.
        """
        c, qkv_size = config, (config.num_q_heads + 2 * config.num_kv_heads) * config.head_dim
        return cls(
            attention=AttentionLayer(index, c.windows[index], c.scale),
            cos_sin=cos_sin[c.ropes[index]],
            input_norm=torch.empty(c.hidden_size, dtype=dtype, device=device),
            qkv=linear.create(qkv_size, c.hidden_size, dtype, device),
            qkv_bias=zeros_if(c.has_qkv_bias, qkv_size, dtype, device),
            q_norm=zeros_if(c.has_qk_norm, c.head_dim, dtype, device),
            k_norm=zeros_if(c.has_qk_norm, c.head_dim, dtype, device),
            output=linear.create(c.hidden_size, c.num_q_heads * c.head_dim, dtype, device),
            output_bias=zeros_if(c.has_output_bias, c.hidden_size, dtype, device),
            post_norm=torch.empty(c.hidden_size, dtype=dtype, device=device),
            mlp=create_mlp(index, c, linear, dtype, device),
        )

    def stored(self, whole: DecoderConfig) -> list[StoredWeight]:
        """Return where a checkpoint's weights of this layer go."""
        hidden, head_dim = whole.hidden_size, whole.head_dim
        q_size, kv_size = whole.num_q_heads * head_dim, whole.num_kv_heads * head_dim
        prefix = f"model.layers.{self.attention.index}"
        attention = f"{prefix}.self_attn"
        sizes = {"q": q_size, "k": kv_size, "v": kv_size}
        return [
            StoredWeight(self.input_norm, ((f"{prefix}.input_layernorm.weight", hidden),)),
            StoredWeight(
                self.qkv,
                tuple((f"{attention}.{x}_proj.weight", size, hidden) for x, size in sizes.items()),
            ),
            StoredWeight(
                self.qkv_bias,
                tuple((f"{attention}.{x}_proj.bias", size) for x, size in sizes.items()),
            ),
            StoredWeight(self.q_norm, ((f"{attention}.q_norm.weight", head_dim),)),
            StoredWeight(self.k_norm, ((f"{attention}.k_norm.weight", head_dim),)),
            StoredWeight(self.output, ((f"{attention}.o_proj.weight", hidden, q_size),)),
            StoredWeight(self.output_bias, ((f"{attention}.o_proj.bias", hidden),)),
            StoredWeight(self.post_norm, ((f"{prefix}.post_attention_layernorm.weight", hidden),)),
            *self.mlp.stored(f"{prefix}.mlp", whole),
        ]

    @property
    def linear_weights(self) -> list[LinearWeight]:
        """The weights of the layer's linear layers, those of the MLP first."""
        return [
            *self.mlp.weights,
            LinearWeight(self.qkv, is_gated=False),
            LinearWeight(self.output, is_gated=False),
        ]

    @property
    def kind(self) -> Hashable:
        """What decides which kernels the layer launches."""
        return self.attention.window, type(self.mlp)
