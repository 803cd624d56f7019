"""What distinguishes a family of models from llama: one line of data for each.

The fused decoder computes llama. A line names what is different, and `config` adds the numbers of
one model. What no field can say is left to Hugging Face's modules (`hf_decoder`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A family of models. The defaults are llama's."""

    norm: str = "rms"
    """RMSNorm is "rms"; "rms32" multiplies by the weight before it rounds; "rms32 + 1" likewise,
    where a checkpoint has the weight minus 1. "layer": LayerNorm; "layer + bias": with a bias."""
    norms: str = "before"
    """A norm is "before" attention and before the MLP, or "after" each, or "both". "parallel": one
    is before both, which read the same."""
    qk_norm: str = ""
    """RMSNorm of queries and keys before they are rotated: of each "head", or of the "whole". Of
    each "rotated" head: after that."""
    scales_queries: bool = False
    """Queries have a factor that grows with their position (`llama_4_scaling_beta`)."""
    rope: str = "halves"
    """An element of a head is rotated with the one half a head away ("halves"), or with its
    neighbour ("pairs"). "learned": nothing is rotated; the embedding of its position is added to a
    token's."""
    is_partial: bool = False
    """`partial_rotary_factor` says which share of a head is rotated."""
    rotated: str = "all"
    """Layers that rotate: "all", those with a "window", or as "no_rope_layers" says."""
    has_ropes_by_type: bool = False
    """`rope_parameters` has an entry for each of `layer_types`."""
    windows: str = "none"
    """Layers that attend within `sliding_window`: "none", "all", or as "layer_types" says."""
    activations: tuple[str, ...] = ("silu",)
    """What the MLP may compute of its neurons."""
    is_gated: bool = True
    """The MLP multiplies its neurons, after the activation, by others."""
    biases: tuple[str | bool, str | bool, str | bool] = (
        "attention_bias",
        "attention_bias",
        "mlp_bias",
    )
    """Whether QKV, the attention's output and the MLP have biases, or the config's field for it."""
    has_sinks: bool = False
    """Each query head has one more score, without a value (`AttentionLayer.sinks`)."""
    scale: str = ""
    """The config's field for the scale of the scores: "attention_multiplier", a factor, with three
    other multipliers; or "query_pre_attn_scalar", which takes the place of `head_dim`."""
    scales_embedding: bool = False
    """The embedding is multiplied by the square root of the hidden size."""
    position_offset: int = 0
    """Rows of the embedding of positions before that of position 0."""
    is_transposed: bool = False
    """Checkpoints have `[in_size, out_size]` in the layers' linear weights."""
    merged: tuple[str, ...] = ()
    """Weights that checkpoints merge as the decoder does: "qkv", "gate_up"."""
    names: tuple[tuple[str, str], ...] = ()
    """Parts of the weights' names, and what they are here: llama's names, or `after_..._norm`."""

    @property
    def is_lesson(self) -> bool:
        """Whether the lesson's operations compute it; else those of an extra do."""
        others = (self.norm, self.norms, self.rope, self.is_partial, self.rotated, self.names)
        plain = others == ("rms", "before", "halves", False, "all", ()) and self.is_gated
        more = self.qk_norm in ("whole", "rotated") or self.scales_queries or self.has_sinks
        return plain and not more and not self.merged


GELU = ("gelu_pytorch_tanh", "gelu_new")
AFTER = (
    ("post_attention_layernorm", "after_attention_norm"),
    ("post_feedforward_layernorm", "after_mlp_norm"),
)

FAMILIES = {
    "llama": Family(),
    "mistral": Family(windows="all"),
    "qwen2": Family(windows="layer_types", biases=(True, False, "mlp_bias")),
    "qwen3": Family(windows="layer_types", qk_norm="head"),
    "seed_oss": Family(biases=("attention_bias", "attention_out_bias", "mlp_bias")),
    "phi3": Family(windows="all", is_partial=True, merged=("qkv", "gate_up")),
    "smollm3": Family(windows="layer_types", rotated="no_rope_layers"),
    "ernie4_5": Family(rope="pairs", biases=("use_bias",) * 3),
    "granite": Family(scale="attention_multiplier"),
    "arcee": Family(is_gated=False, activations=("relu2",)),
    "apertus": Family(
        qk_norm="head",
        is_gated=False,
        activations=("xielu",),
        names=(
            ("attention_layernorm", "input_layernorm"),
            ("feedforward_layernorm", "post_attention_layernorm"),
        ),
    ),
    "olmo2": Family(norm="rms32", norms="after", qk_norm="whole", names=AFTER),
    "olmo3": Family(
        norm="rms32",
        norms="after",
        qk_norm="whole",
        has_ropes_by_type=True,
        windows="layer_types",
        names=AFTER,
    ),
    "exaone4": Family(
        norms="after", qk_norm="head", windows="layer_types", rotated="window", names=AFTER
    ),
    "glm4": Family(
        norms="both",
        rope="pairs",
        is_partial=True,
        biases=("attention_bias", False, False),
        merged=("gate_up",),
        names=(
            ("post_self_attn_layernorm", "after_attention_norm"),
            ("post_mlp_layernorm", "after_mlp_norm"),
        ),
    ),
    "gemma": Family(norm="rms32 + 1", activations=GELU, scales_embedding=True),
    "gemma3_text": Family(
        norm="rms32 + 1",
        norms="both",
        qk_norm="head",
        has_ropes_by_type=True,
        windows="layer_types",
        activations=GELU,
        scale="query_pre_attn_scalar",
        scales_embedding=True,
        names=(*AFTER, ("pre_feedforward_layernorm", "post_attention_layernorm")),
    ),
    "ministral3": Family(windows="all", scales_queries=True, biases=(False, False, False)),
    "hunyuan_v1_dense": Family(
        qk_norm="rotated",
        biases=("attention_bias", "attention_bias", False),
        names=(("query_layernorm", "q_norm"), ("key_layernorm", "k_norm")),
    ),
    "cohere2": Family(
        norm="layer",
        norms="parallel",
        rope="pairs",
        rotated="window",
        windows="layer_types",
        biases=("attention_bias", "attention_bias", False),
    ),
    "starcoder2": Family(
        norm="layer + bias",
        windows="all",
        activations=GELU,
        is_gated=False,
        biases=("use_bias",) * 3,
        names=((".c_fc.", ".up_proj."), (".c_proj.", ".down_proj.")),
    ),
    "opt": Family(
        norm="layer + bias",
        rope="learned",
        position_offset=2,
        activations=("relu", *GELU),
        is_gated=False,
        biases=("enable_bias",) * 3,
        names=(
            ("model.decoder.final_layer_norm", "model.norm"),
            ("model.decoder.", "model."),
            (".self_attn_layer_norm.", ".input_layernorm."),
            (".final_layer_norm.", ".post_attention_layernorm."),
            (".out_proj.", ".o_proj."),
            (".fc1.", ".mlp.up_proj."),
            (".fc2.", ".mlp.down_proj."),
        ),
    ),
    "gpt2": Family(
        norm="layer + bias",
        rope="learned",
        activations=GELU,
        is_gated=False,
        biases=(True, True, True),
        is_transposed=True,
        merged=("qkv",),
        names=(
            ("transformer.h.", "model.layers."),
            ("transformer.ln_f.", "model.norm."),
            ("transformer.wte.", "model.embed_tokens."),
            ("transformer.wpe.", "model.embed_positions."),
            (".ln_1.", ".input_layernorm."),
            (".ln_2.", ".post_attention_layernorm."),
            (".attn.c_attn.", ".self_attn.qkv_proj."),
            (".attn.c_proj.", ".self_attn.o_proj."),
            (".c_fc.", ".up_proj."),
            (".c_proj.", ".down_proj."),
        ),
    ),
    # With experts: `extras.experts.config` has what these need.
    "qwen3_moe": Family(windows="all", qk_norm="head"),
    "qwen2_moe": Family(windows="layer_types", biases=("qkv_bias", False, False)),
    "mixtral": Family(windows="all"),
    "olmoe": Family(qk_norm="whole"),
    "granitemoe": Family(scale="attention_multiplier"),
    "ernie4_5_moe": Family(rope="pairs", biases=("use_bias",) * 3),
    "glm4_moe": Family(qk_norm="head", is_partial=True, biases=("attention_bias", False, False)),
    "dots1": Family(windows="layer_types", qk_norm="head"),
    "minimax_m2": Family(qk_norm="whole", is_partial=True, biases=(False, False, False)),
    "gpt_oss": Family(
        norm="rms32",
        windows="layer_types",
        has_sinks=True,
        biases=("attention_bias", "attention_bias", False),
    ),
}
