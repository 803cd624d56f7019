"""A layer of another family: how its weights are stored, and in which order they are kept.

Which elements of a head are rotated together, and which not at all, is settled when weights are
loaded: the rows of Q and K are put into an order in which the lesson's kernel rotates them.

    a head as it is stored: pairs, half of it rotated    a0 b0 a1 b1 p0 p1 p2 p3
    and as it is computed                                a0 a1 p0 p1 b0 b1 p2 p3    p: angle zero

Scores are sums over a head, so its order does not matter if queries and keys have the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.layer import Layer
from m5_kernels.decoder.weights import Convert, StoredWeight

from .norms import NormWeight


@dataclass(frozen=True)
class FamilyLayer(Layer):
    """A layer with the norms of its family."""

    norms: Mapping[str, NormWeight]
    """By their names: `input_layernorm`, `after_attention_norm`, `post_attention_layernorm`,
    `after_mlp_norm`. `input_norm` and `post_norm` are made of them."""

    def stored(self, whole: DecoderConfig) -> list[StoredWeight]:
        """Return where a checkpoint's weights of this layer go."""
        c, hidden = whole, whole.hidden_size
        prefix = f"model.layers.{self.attention.index}"
        attention, family = f"{prefix}.self_attn", c.family
        q_size, kv_size = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        order = head_order(family.rope, c.head_dim, c.rotary_dim or c.head_dim)
        qkv = {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size}
        rotated = {"q_proj": q_size, "k_proj": kv_size}
        if "qkv" in family.merged:
            qkv, rotated = {"qkv_proj": q_size + 2 * kv_size}, {"qkv_proj": q_size + kv_size}
        converts = {
            f"{attention}.{name}.{kind}": in_order(order, size)
            for name, size in rotated.items()
            for kind in ("weight", "bias")
        }
        stored = [
            StoredWeight(
                self.qkv,
                tuple((f"{attention}.{x}.weight", size, hidden) for x, size in qkv.items()),
                converts,
            ),
            StoredWeight(
                self.qkv_bias,
                tuple((f"{attention}.{x}.bias", size) for x, size in qkv.items()),
                converts,
            ),
            StoredWeight(self.output, ((f"{attention}.o_proj.weight", hidden, q_size),)),
            StoredWeight(self.output_bias, ((f"{attention}.o_proj.bias", hidden),)),
            StoredWeight(self.attention.sinks, ((f"{attention}.sinks", c.num_q_heads),)),
            *self.mlp.stored(f"{prefix}.mlp", whole),
        ]
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                key = f"{attention}.{name}.weight"
                reordered, scaled = in_order(order, len(norm)), norm_weight(family.norm)
                convert = {key: lambda w, r=reordered, s=scaled: s(r(w))}
                stored.append(StoredWeight(norm, ((key, len(norm)),), convert))
        for name, each in self.norms.items():
            stored += stored_norm(each, f"{prefix}.{name}", whole)
        return stored


def stored_norm(
    norm: NormWeight, name: str, whole: DecoderConfig, divisor: float = 1.0
) -> list[StoredWeight]:
    """Return where a checkpoint's norm goes. divisor: of the weight and the bias."""
    size, scaled = whole.hidden_size, norm_weight(whole.family.norm)
    weight, bias = f"{name}.weight", f"{name}.bias"
    return [
        StoredWeight(norm.weight, ((weight, size),), {weight: lambda w: scaled(w) / divisor}),
        StoredWeight(norm.bias, ((bias, size),), {bias: lambda b: b.float() / divisor}),
    ]


def norm_weight(norm: str) -> Convert:
    """Return what makes a weight of a stored one. The sum with 1 is not rounded to 16 bits."""
    return (lambda weight: weight.float() + 1) if norm.endswith("+ 1") else torch.Tensor.float


def head_order(rope: str, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Return which element of a stored head is at each place of a computed one.

    A kernel rotates element i with i + head_dim / 2. The last elements of each half have the angle
    zero.
    """
    rotated, kept = torch.arange(rotary_dim), torch.arange(rotary_dim, head_dim)
    pairs = rotated.view(2, -1) if rope != "pairs" else rotated.view(-1, 2).T
    return torch.cat((pairs, kept.view(2, -1)), dim=1).flatten()


def in_order(order: torch.Tensor, size: int) -> Convert:
    """Return what puts the first `size` rows of a weight, heads one after the other, in order."""

    def convert(weight: torch.Tensor) -> torch.Tensor:
        heads = weight[:size].unflatten(0, (-1, len(order)))
        return torch.cat((heads[:, order.to(weight.device)].flatten(0, 1), weight[size:]))

    return convert
