"""What the fused decoder must know of a model, read from its Hugging Face config.

Any feature that the decoder does not compute is refused here by name. The engine then runs Hugging
Face's modules with its own attention (`hf_decoder`). `load` finds what no config says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from milestone_llm.core.errors import InputError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # their angles depend on position alone


@dataclass(frozen=True)
class DecoderConfig:
    """Shape of a decoder, in counts, not bytes. `windows` has an entry a layer; None: no window."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_output_bias: bool
    has_mlp_bias: bool
    has_qk_norm: bool
    is_tied: bool

    @classmethod
    def from_hf(cls, config: Any) -> DecoderConfig:
        """Read a Hugging Face config.

        Raises:
            InputError: the config has a feature that the fused decoder does not compute; the
                message names the first one.
        """
        family = config.model_type
        if family not in FAMILIES:
            raise InputError(f"no fused decoder for {family!r}; there is one for {FAMILIES}")
        rope = getattr(config, "rope_parameters", None) or {}
        partial = rope.get("partial_rotary_factor", getattr(config, "partial_rotary_factor", 1.0))
        rope_type = rope.get("rope_type", "default")
        pretraining_tp = getattr(config, "pretraining_tp", 1)
        refusals = {
            f"activation {config.hidden_act!r}": config.hidden_act != "silu",
            f"rope_type {rope_type!r}": rope_type not in ROPE_TYPES,
            f"partial_rotary_factor {partial}": partial not in (None, 1.0),
            "quantized weights": getattr(config, "quantization_config", None) is not None,
            f"pretraining_tp {pretraining_tp}": pretraining_tp not in (None, 1),
        }
        num_q_heads = config.num_attention_heads
        num_kv_heads = config.num_key_value_heads or num_q_heads
        refusals |= {
            f"{num_q_heads} heads over {num_kv_heads} of keys": num_q_heads % num_kv_heads != 0,
            f"rms_norm_eps {config.rms_norm_eps}": not 0 <= config.rms_norm_eps < math.inf,
        }
        for feature, is_present in refusals.items():
            if is_present:
                raise InputError(f"the fused decoder does not compute {feature} of {family}")
        attention_bias = bool(getattr(config, "attention_bias", False))
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // num_q_heads,
            rms_norm_eps=config.rms_norm_eps,
            windows=_windows(config),
            has_qkv_bias=family == "qwen2" or attention_bias,
            has_output_bias=family != "qwen2" and attention_bias,
            has_mlp_bias=bool(getattr(config, "mlp_bias", False)),
            has_qk_norm=family == "qwen3",
            is_tied=config.tie_word_embeddings,
        )

    @classmethod
    def of_model(cls, model: Any) -> DecoderConfig:
        """Read a model that has its weights. They, not the config, say if the LM head is tied."""
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        return replace(cls.from_hf(model.config), is_tied=head.weight is embedding.weight)


def is_fusible(config: Any) -> bool:
    """Return whether the fused decoder computes all that a Hugging Face config asks for."""
    try:
        DecoderConfig.from_hf(config)
    except InputError:
        return False
    return True


def rope_table(config: Any, max_positions: int | None = None) -> torch.Tensor:
    """Return cosines and sines by position, fp32 `[max_positions, head_dim]`.

    Hugging Face's own code computes them. It knows every kind of scaling, and all families here
    share it.
    """
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.arange(max_positions or config.max_position_embeddings)
    rotary = LlamaRotaryEmbedding(config)
    cos, sin = rotary(torch.zeros(1), positions[None])
    half = cos.shape[-1] // 2  # the other half repeats it
    return torch.cat((cos[0, :, :half], sin[0, :, :half]), dim=-1)


def _windows(config: Any) -> tuple[int | None, ...]:
    window = getattr(config, "sliding_window", None)
    if config.model_type == "llama" or window is None:
        return (None,) * config.num_hidden_layers
    if config.model_type == "mistral":
        return (window,) * config.num_hidden_layers
    return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
