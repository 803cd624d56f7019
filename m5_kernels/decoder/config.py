"""What the fused decoder must know of a model, read from its Hugging Face config.

Any feature that the decoder does not compute is refused here by name. The engine then runs Hugging
Face's modules with its own attention (`hf_decoder`). `load` finds what no config says.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from milestone_llm.core.errors import InputError

from .families import FAMILIES, Family

ROPE_TYPES = ("default", "linear", "llama3", "yarn", "ntk_alpha")
"""Their angles depend on position alone."""

QUERY_SCALING = ("llama_4_scaling_beta", "original_max_position_embeddings")
"""Entries of `rope_parameters`, as `DecoderConfig.query_scaling` has them."""


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder, in counts, not bytes. `windows` and `ropes` have an entry a layer."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    windows: tuple[int | None, ...]
    """None: no window."""
    ropes: tuple[int, ...]
    """Which of the tables of `rope_tables` a layer rotates by."""
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool
    family: Family = FAMILIES["llama"]
    activation: str = "silu"
    scale: float | None = None
    """Factor of the attention scores; None: `head_dim ** -0.5`."""
    num_positions: int = 0
    """Positions that have an embedding; 0: tokens are rotated instead."""
    rotary_dim: int | None = None
    """Elements of a head that are rotated; None: all."""
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    """Factor of what a layer adds to the residual stream."""
    logits_scaling: float = 1.0
    """Logits are divided by it."""
    query_scaling: tuple[float, int] | None = None
    """beta and length of `1 + beta * log(1 + position // length)`, a factor of queries."""

    @classmethod
    def from_hf(cls, config: Any) -> DecoderConfig:
        """Read a Hugging Face config.

        Raises:
            InputError: the config has a feature that the fused decoder does not compute; the
                message names the first one.
        """
        name = config.model_type
        if name not in FAMILIES:
            raise InputError(f"no fused decoder for {name!r}")
        family = FAMILIES[name]

        def read(*names: str, default: Any = None) -> Any:
            """Return the first of these fields that the family has, and that is not None."""
            values = (_field(config, name) for name in names)
            return next((value for value in values if value is not None), default)

        hidden_size, num_q_heads = config.hidden_size, config.num_attention_heads
        # Hugging Face's modules and KV cache read these two, even if the family has no such field.
        num_kv_heads = getattr(config, "num_key_value_heads", None) or num_q_heads
        head_dim = getattr(config, "head_dim", None) or hidden_size // num_q_heads
        epsilon = read(
            "rms_norm_eps", "norm_epsilon", "layer_norm_epsilon", "layer_norm_eps", default=1e-5
        )
        activation = read("hidden_act", "hidden_activation", "activation_function")
        ropes = _rope_parameters(config)
        partial = next(iter(ropes.values()), {}).get("partial_rotary_factor")
        if partial is None:
            partial = read("partial_rotary_factor", default=1.0)
        num_rotated = int(head_dim * partial)
        pretraining_tp = read("pretraining_tp", default=1)
        window, kinds = getattr(config, "sliding_window", None), _unknown_layer_types(config)
        rope_types = {_rope_type(each) for each in ropes.values()}
        scale: Any = getattr(config, family.scale) if family.scale else None
        refusals = {
            f"activation {activation!r}": activation not in family.activations,
            **{f"rope_type {kind!r}": kind not in ROPE_TYPES for kind in rope_types},
            f"partial_rotary_factor {partial}": (
                num_rotated < 1 if family.is_partial else partial != 1
            ),
            f"heads of {head_dim} numbers": head_dim % 2 == 1,
            f"rope_parameters without {' and '.join(QUERY_SCALING)}": family.scales_queries
            and not ropes.get("", {}).keys() >= set(QUERY_SCALING),
            f"layers of type {', '.join(sorted(kinds))} with a window of {window}": bool(kinds),
            f"query_pre_attn_scalar {scale}": (
                family.scale == "query_pre_attn_scalar" and not scale > 0
            ),
            f"weights quantized by {_quantizer(config)!r}": _quantizer(config) is not None,
            f"pretraining_tp {pretraining_tp}": pretraining_tp != 1,
            "norms of what yarn has scaled": family.qk_norm == "rotated" and "yarn" in rope_types,
            "scores by the number of the layer": bool(read("scale_attn_by_inverse_layer_idx")),
            "scores without a scale": not read("scale_attn_weights", default=True),
            "norms after the addition": not read("do_layer_norm_before", default=True),
            "no norm at the end": bool(read("_remove_final_layer_norm")),
            "norms without a weight": not read("layer_norm_elementwise_affine", default=True),
            "an embedding of another size": read("word_embed_proj_dim") not in (None, hidden_size),
            "soft-capping of scores": read("attn_logit_softcapping") is not None,
            "soft-capping of logits": read("final_logit_softcapping") is not None,
            "clipped queries, keys and values": read("clip_qkv") is not None,
            "attention in both directions": bool(read("use_bidirectional_attention"))
            or not getattr(config, "is_causal", True),
            f"{num_q_heads} heads over {num_kv_heads} of keys": num_q_heads % num_kv_heads != 0,
            f"{config.num_hidden_layers} layers": config.num_hidden_layers < 1,
            f"rms_norm_eps {epsilon}": not 0 <= epsilon < math.inf,
        }
        for feature, is_present in refusals.items():
            if is_present:
                raise InputError(f"the fused decoder does not compute {feature} of {name}")
        qkv, output, mlp = (
            bool(read(bias)) if isinstance(bias, str) else bias for bias in family.biases
        )
        if family.scale == "query_pre_attn_scalar":
            scale = scale**-0.5
        multipliers = {}
        if family.scale == "attention_multiplier":
            names = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
            multipliers = {name: getattr(config, name) for name in names}
        if read("logit_scale") is not None:
            multipliers["logits_scaling"] = 1 / config.logit_scale
        query_scaling = None
        if family.scales_queries:
            rope = config.rope_parameters
            query_scaling = tuple(rope[name] for name in QUERY_SCALING)
        root = hidden_size**0.5 if family.scales_embedding else 1.0
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=hidden_size,
            intermediate_size=read("intermediate_size", "ffn_dim", "n_inner") or 4 * hidden_size,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=epsilon,
            windows=_windows(config, family),
            ropes=_ropes(config, family),
            has_qkv_bias=qkv,
            has_output_bias=output,
            has_mlp_bias=mlp,
            has_qk_norm=bool(family.qk_norm) and read("use_qk_norm", default=True),
            is_tied=config.tie_word_embeddings,
            family=family,
            activation=activation,
            scale=scale,
            num_positions=config.max_position_embeddings if family.rope == "learned" else 0,
            rotary_dim=num_rotated + num_rotated % 2 if family.is_partial else None,
            query_scaling=query_scaling,
            **{"embedding_multiplier": root, **multipliers},
        )

    @classmethod
    def of_model(cls, model: Any) -> DecoderConfig:
        """Read a model that has its weights. They, not the config, say if the LM head is tied."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        return replace(cls.from_hf(model.config), is_tied=head.weight is embedding.weight)

    @property
    def multipliers(self) -> tuple[float, float, float]:
        """The factors of the embedding, the residual stream and (its inverse) the logits."""
        return self.embedding_multiplier, self.residual_multiplier, self.logits_scaling

    @property
    def is_lesson(self) -> bool:
        """Whether the lesson's operations compute the model; else an extra's do."""
        return self.family.is_lesson and self.multipliers == (1, 1, 1)


def is_fusible(config: Any) -> bool:
    """Return whether the fused decoder computes all that a Hugging Face config asks for."""
    try:
        DecoderConfig.from_hf(config)
    except InputError:
        return False
    return True


def has_experts(config: Any) -> bool:
    """Return whether a token chooses among several MLPs of a layer."""
    return bool(_field(config, "num_experts_per_tok"))


def _field(config: Any, name: str) -> Any:
    """Return a field of a config; None if the family has no such field.

    A file may have any fields. Hugging Face's modules do not read those that their family has not.
    """
    kind = type(config)
    is_known = hasattr(kind, kind.attribute_map.get(name, name))
    return getattr(config, name, None) if is_known else None


def _quantizer(config: Any) -> str | None:
    """Return the method that quantized a checkpoint's weights; None if none did."""
    fields = getattr(config, "quantization_config", None)
    if fields is None:
        return None
    method = fields.get("quant_method") if isinstance(fields, dict) else fields.quant_method
    return str(getattr(method, "value", method))  # of a ready model it is an enum's member


def rope_tables(config: Any, max_positions: int | None = None) -> torch.Tensor:
    """Return cosines and sines by position, a table for each kind of layer.

    Hugging Face's own code computes them, as it does for the model. What is not rotated has the
    angle zero, in the last elements of each half.

    Returns:
        fp32 `[num_tables, max_positions, head_dim]`, a position's cosines, then its sines.
        `DecoderConfig.ropes` has the table of each layer.

    Raises:
        InputError: an angle is no number, as with `rope_theta` 0.
    """
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    module = vars(sys.modules[model_class.__module__])
    c, kinds = DecoderConfig.from_hf(config), _rope_parameters(config)
    positions = torch.arange(max_positions or config.max_position_embeddings)
    tables = torch.cat(
        (torch.ones(len(positions), c.head_dim // 2), torch.zeros(len(positions), c.head_dim // 2)),
        dim=-1,
    ).repeat(max(len(kinds), max(c.ropes) + 1), 1, 1)
    for index, kind in enumerate(kinds):
        rotary = next(module[name] for name in module if name.endswith("RotaryEmbedding"))(config)
        arguments = (kind,) if kind else ()
        cos, sin = (each[0] for each in rotary(torch.zeros(1), positions[None], *arguments))
        half = (c.rotary_dim or c.head_dim) // 2
        if cos.shape[1] == 2 * half:  # an angle is there twice: half a head apart, or in a row
            is_in_row = torch.equal(cos[:, ::2], cos[:, 1::2])
            cos, sin = (each[:, ::2] if is_in_row else each[:, :half] for each in (cos, sin))
        tables[index, :, :half] = cos
        tables[index, :, c.head_dim // 2 :][:, :half] = sin
        if not tables[index].isfinite().all():
            raise InputError(f"rope_parameters give angles that are no numbers: {kinds[kind]}")
    return tables


def _rope_parameters(config: Any) -> dict[str, dict[str, Any]]:
    """Return the parameters of each table, by the type of layers that it is for ("": all)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if FAMILIES[config.model_type].rope == "learned":  # such a field changes nothing
        return {}
    if FAMILIES[config.model_type].has_ropes_by_type:
        return {kind: each for kind, each in parameters.items() if kind in config.layer_types}
    return {"": parameters} if parameters else {}


def _unknown_layer_types(config: Any) -> set[str]:
    """Return types of layers of which it is not known what they attend to."""
    windows, window = FAMILIES[config.model_type].windows, getattr(config, "sliding_window", None)
    types: set[str] = set()
    if windows == "layer_types":
        types = set(config.layer_types)
    elif windows == "all" and window is not None:
        types = {"sliding_attention"}
    if window is not None and window > 0:
        types.discard("sliding_attention")
    return types - {"full_attention"}


def _rope_type(parameters: dict[str, Any]) -> str:
    """Return a rotary embedding's type. With `alpha` (Hunyuan), "dynamic" has fixed angles."""
    kind: str = parameters.get("rope_type", "default")
    return "ntk_alpha" if kind == "dynamic" and parameters.get("alpha") else kind


def _ropes(config: Any, family: Family) -> tuple[int, ...]:
    """Return the table of each layer. One past those of all kinds of layers rotates nothing."""
    num_layers, kinds = config.num_hidden_layers, list(_rope_parameters(config))
    if kinds and kinds != [""]:
        return tuple(kinds.index(kind) for kind in config.layer_types)
    is_rotated = [bool(kinds)] * num_layers
    if family.rotated == "no_rope_layers":
        is_rotated = [bool(each) for each in config.no_rope_layers]
    elif family.rotated == "window" and config.sliding_window is not None:
        is_rotated = [kind == "sliding_attention" for kind in config.layer_types]
    return tuple(0 if each else len(kinds) for each in is_rotated)


def _windows(config: Any, family: Family) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if family.windows == "none" or not window:
        return (None,) * config.num_hidden_layers
    if family.windows == "all":
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
