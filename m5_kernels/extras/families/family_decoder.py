"""The lesson's forward over layers of other families, with the operations that they need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from m5_kernels.decoder.config import DecoderConfig
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.decoder.layer import Layer, Norm
from m5_kernels.decoder.ops import LESSON, DecoderOps
from m5_kernels.decoder.shard import Shard
from m5_kernels.decoder.weights import StoredWeight, zeros_if
from milestone_llm.core.errors import InputError

from .family_layer import FamilyLayer, stored_norm
from .mlp import XIELU_CONSTANTS, FamilyMLP
from .norms import EXACT, LAYER, ROUNDED, FamilyNorm, NormWeight, add_norm, embed_norm
from .qk_norm import NormThenRope
from .query_scale import RopeThenNorm, RopeThenScale, position_factors

TRANSPOSED = ("c_attn.weight", "c_fc.weight", "c_proj.weight")
KINDS = {
    "rms": ROUNDED,
    "rms32": EXACT,
    "rms32 + 1": EXACT,
    "layer": LAYER,
    "layer + bias": LAYER,
}


class FamilyDecoder(FusedDecoder):
    """Computes every family of `FAMILIES`. Arguments are those of `FusedDecoder`."""

    def __init__(
        self,
        config: DecoderConfig,
        cos_sin: torch.Tensor,
        dtype: torch.dtype,
        device: torch.device | str,
        ops: DecoderOps | None = None,
        shard: Shard | None = None,
    ) -> None:
        own_ops = family_ops(config, ops or LESSON, cos_sin.shape[1], dtype, device)
        super().__init__(config, cos_sin, dtype, device, own_ops, shard)

    def create_layers(self) -> None:
        """Create the layers, and the norms between them, not yet filled."""
        c = self.config
        after, multiplier = None, c.embedding_multiplier
        is_parallel = c.family.norms == "parallel"
        self.positions: torch.Tensor | None = None
        if c.num_positions:
            shape = (c.num_positions, c.hidden_size)
            self.positions = torch.empty(shape, dtype=self.dtype, device=self.device)
        if c.family.scales_embedding:  # by a number of the model's dtype
            multiplier = float(torch.tensor(multiplier, dtype=self.dtype))
        layers = []
        for index in range(len(c.windows)):
            plain = Layer.create(
                index, c, self.cos_sin, self.ops.linear, self.ops.mlp, self.dtype, self.device
            )
            norms = {name: self._norm() for name in norm_names(c.family.norms)}
            q_norm, k_norm = self._qk_norms()
            sinks = zeros_if(c.family.has_sinks, c.num_q_heads, self.dtype, self.device)
            made = {
                "attention": replace(plain.attention, sinks=sinks),
                "input_norm": self._joined(after, norms.get("input_layernorm"), multiplier),
                "post_norm": self._joined(
                    norms.get("after_attention_norm"),
                    norms["input_layernorm"]
                    if is_parallel
                    else norms.get("post_attention_layernorm"),
                    c.residual_multiplier,
                    is_parallel,
                ),
                "q_norm": q_norm,
                "k_norm": k_norm,
            }
            layers.append(FamilyLayer(**{**vars(plain), **made}, norms=norms))
            after, multiplier = norms.get("after_mlp_norm"), c.residual_multiplier
        if self.positions is not None:
            layers[0] = replace(
                layers[0], input_norm=replace(layers[0].input_norm, positions=self.positions)
            )
        self.layers, self.last_norm = layers, self._norm()
        self.final_norm = self._joined(after, self.last_norm, multiplier)

    def _norm(self) -> NormWeight:
        norm, size = self.config.family.norm, self.config.hidden_size
        dtype = torch.float32 if has_own_norms(self.config) else self.dtype
        bias = torch.zeros(size, device=self.device) if norm == "layer + bias" else None
        return NormWeight(KINDS[norm], torch.empty(size, dtype=dtype, device=self.device), bias)

    def _joined(
        self,
        after: NormWeight | None,
        before: NormWeight | None,
        multiplier: float,
        is_parallel: bool = False,
    ) -> Norm:
        """Return what an operation between two linear layers takes as its norm."""
        if has_own_norms(self.config):
            return FamilyNorm(after, before, multiplier, is_parallel=is_parallel)
        assert before is not None
        return before.weight

    def _qk_norms(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        c = self.config
        if not c.has_qk_norm:
            return None, None
        heads = (c.num_q_heads, c.num_kv_heads) if c.family.qk_norm == "whole" else (1, 1)
        is_plain = c.family.norm == "rms" and c.family.qk_norm != "rotated"
        dtype = self.dtype if is_plain else torch.float32
        q_norm, k_norm = (
            torch.empty(num * c.head_dim, dtype=dtype, device=self.device) for num in heads
        )
        return q_norm, k_norm

    def name_of(self, name: str) -> str:
        """Return what a checkpoint's weight is called here."""
        for theirs, ours in self.config.family.names:
            name = name.replace(theirs, ours)
        return name

    def load(self, weights: Iterable[tuple[str, Any]]) -> None:
        """Copy weights, one at a time; see `FusedDecoder.load`."""
        if self.config.family.is_transposed:
            weights = (
                (name, weight[:, :].T if name.endswith(TRANSPOSED) else weight)
                for name, weight in weights
            )
        super().load((name, weight) for name, weight in weights if not _is_of_xielu(name, weight))

    def stored(self) -> list[StoredWeight]:
        """Return where a checkpoint's weights go."""
        whole = self.whole_config
        vocab, offset = (whole.vocab_size, whole.hidden_size), whole.family.position_offset
        return [
            StoredWeight(self.embedding, (("model.embed_tokens.weight", *vocab),)),
            StoredWeight(None if whole.is_tied else self.lm_head, (("lm_head.weight", *vocab),)),
            StoredWeight(
                self.positions,
                (
                    (
                        "model.embed_positions.weight",
                        whole.num_positions + offset,
                        whole.hidden_size,
                    ),
                ),
                {"model.embed_positions.weight": lambda table: table[offset:]},
            ),
            *stored_norm(self.last_norm, "model.norm", whole, whole.logits_scaling),
            *(each for layer in self.layers for each in layer.stored(whole)),
        ]


def _is_of_xielu(name: str, weight: Any) -> bool:
    """Return whether a weight is one of xIELU's two constants, which must be what they are here.

    Raises:
        InputError: it has another value.
    """
    constant = XIELU_CONSTANTS.get(name.rpartition(".act_fn.")[2])
    if constant is not None and abs(float(weight[...]) / constant - 1) > 0.01:
        raise InputError(f"the fused decoder computes xIELU with {constant}, not as {name} says")
    return constant is not None


def has_own_norms(config: DecoderConfig) -> bool:
    """Return whether the lesson's norms do not do."""
    is_plain = config.family.norm == "rms" and config.family.norms == "before"
    return not is_plain or config.multipliers != (1, 1, 1)


def norm_names(norms: str) -> list[str]:
    """Return the names of a layer's norms, given `Family.norms`."""
    before = ["input_layernorm", "post_attention_layernorm"]
    after = ["after_attention_norm", "after_mlp_norm"]
    return {
        "before": before,
        "after": after,
        "both": before + after,
        "parallel": ["input_layernorm"],
    }[norms]


def family_ops(
    config: DecoderConfig,
    ops: DecoderOps,
    max_positions: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> DecoderOps:
    """Return the operations, with those replaced in which a family is not as the lesson."""
    family = config.family
    if has_own_norms(config):
        ops = replace(ops, embed_norm=embed_norm, add_norm=add_norm, last_norm=add_norm)
    if config.has_qk_norm and family.qk_norm == "whole":
        ops = replace(ops, rope_kv_write=NormThenRope(ops.rope_kv_write))
    if config.has_qk_norm and family.qk_norm == "rotated":
        ones = torch.ones(config.head_dim, dtype=dtype, device=device)
        ops = replace(ops, rope_kv_write=RopeThenNorm(ops.rope_kv_write, ones))
    if config.query_scaling is not None:
        factors = position_factors(*config.query_scaling, max_positions).to(device)
        ops = replace(ops, rope_kv_write=RopeThenScale(ops.rope_kv_write, factors))
    is_dense = ops.mlp is LESSON.mlp
    if is_dense and (not family.is_gated or config.activation != "silu" or family.merged):
        ops = replace(ops, mlp=FamilyMLP.create)
    return ops
