"""What must be known of a family's experts, read from its Hugging Face config."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from milestone_llm.core.errors import InputError

from .routing import SIGMOID, SOFTMAX_OF_CHOSEN, Routing
from .swiglu import ClampedSwiGLU


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts of a model: how many, how large, in which layers, and how tokens choose them."""

    routing: Routing
    size: int
    """Neurons of an expert (`moe_intermediate_size`)."""
    sparse_layers: frozenset[int]
    """The layers that have experts. The others have a dense MLP."""
    shared_size: int = 0
    """Neurons of the expert that all tokens meet; 0: there is none."""
    router: str = "gate"
    """Name of the router in a checkpoint."""
    shared: str = "shared_experts"
    """Name of the shared expert."""
    shared_gate: str | None = None
    """Name of the linear layer that weighs the shared expert, token by token."""
    bias: str | None = None
    """Name of the correction of scores, which changes the choice alone."""
    bias_shape: tuple[int, ...] = ()
    block: str = "mlp"
    """Name of the whole in a layer."""
    routes_in_fp32: bool = False
    """Whether the router multiplies in fp32 and not in the model's dtype."""
    has_biases: bool = False
    """Whether the router and the experts add biases."""
    swiglu: ClampedSwiGLU | None = None
    """What experts compute of gate and up; None: SiLU(gate) * up."""
    is_interleaved: bool = False
    """Whether checkpoints have `[in_size, out_size]`, where gate and up take turns."""


def _qwen2_moe(c: Any) -> ExpertsConfig:
    return ExpertsConfig(
        routing=Routing(c.num_experts, c.num_experts_per_tok, is_renormalised=c.norm_topk_prob),
        size=c.moe_intermediate_size,
        sparse_layers=_every(c, c.decoder_sparse_step) - set(c.mlp_only_layers),
        shared_size=c.shared_expert_intermediate_size,
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    )


def _qwen3_moe(c: Any) -> ExpertsConfig:
    return ExpertsConfig(
        routing=Routing(c.num_experts, c.num_experts_per_tok, is_renormalised=c.norm_topk_prob),
        size=c.moe_intermediate_size,
        sparse_layers=_every(c, c.decoder_sparse_step) - set(c.mlp_only_layers),
    )


def _mixtral(c: Any) -> ExpertsConfig:
    routing = Routing(c.num_local_experts, c.num_experts_per_tok)
    return ExpertsConfig(routing, c.intermediate_size, _every(c))


def _olmoe(c: Any) -> ExpertsConfig:
    routing = Routing(c.num_experts, c.num_experts_per_tok, is_renormalised=c.norm_topk_prob)
    return ExpertsConfig(routing, c.intermediate_size, _every(c))


def _granitemoe(c: Any) -> ExpertsConfig:
    routing = Routing(
        c.num_local_experts, c.num_experts_per_tok, SOFTMAX_OF_CHOSEN, is_renormalised=False
    )
    return ExpertsConfig(
        routing, c.intermediate_size, _every(c), router="router", block="block_sparse_moe"
    )


def _ernie4_5_moe(c: Any) -> ExpertsConfig:
    within = range(c.moe_layer_start_index, c.moe_layer_end_index + 1)
    return ExpertsConfig(
        routing=Routing(c.num_experts, c.num_experts_per_tok, least_sum=c.moe_norm_min),
        size=c.moe_intermediate_size,
        sparse_layers=_every(c, c.moe_layer_interval) & set(within),
        shared_size=c.moe_intermediate_size * c.moe_num_shared_experts,
        bias="gate.moe_statics.e_score_correction_bias",
        bias_shape=(1, c.num_experts),
        routes_in_fp32=True,
    )


def _glm4_moe(c: Any) -> ExpertsConfig:
    return ExpertsConfig(
        routing=Routing(
            c.num_local_experts,
            c.num_experts_per_tok,
            SIGMOID,
            is_renormalised=c.norm_topk_prob,
            least_sum=1e-20,
            scale=c.routed_scaling_factor,
            num_groups=c.n_group,
            top_groups=c.topk_group,
        ),
        size=c.moe_intermediate_size,
        sparse_layers=frozenset(range(c.first_k_dense_replace, c.num_hidden_layers)),
        shared_size=c.moe_intermediate_size * c.n_shared_experts,
        bias="gate.e_score_correction_bias",
        bias_shape=(c.num_local_experts,),
        routes_in_fp32=True,
    )


def _minimax_m2(c: Any) -> ExpertsConfig:
    return ExpertsConfig(
        routing=Routing(c.num_local_experts, c.num_experts_per_tok, SIGMOID),
        size=c.intermediate_size,
        sparse_layers=_every(c),
        bias="e_score_correction_bias",
        bias_shape=(c.num_local_experts,),
    )


def _gpt_oss(c: Any) -> ExpertsConfig:
    return ExpertsConfig(
        routing=Routing(
            c.num_local_experts, c.num_experts_per_tok, SOFTMAX_OF_CHOSEN, is_renormalised=False
        ),
        size=c.intermediate_size,
        sparse_layers=_every(c),
        router="router",
        has_biases=True,
        swiglu=ClampedSwiGLU(
            getattr(c, "swiglu_alpha", 1.702), getattr(c, "swiglu_limit", 7.0)
        ),  # fields that older releases of transformers do not have
        is_interleaved=True,
    )


def _every(c: Any, step: int = 1) -> frozenset[int]:
    """Return every so many layers; with a step of 2 they are 1, 3, 5 and so on."""
    return frozenset(range(step - 1, c.num_hidden_layers, step))


FAMILIES: dict[str, Callable[[Any], ExpertsConfig]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen2_moe": _qwen2_moe,
    "mixtral": _mixtral,
    "olmoe": _olmoe,
    "granitemoe": _granitemoe,
    "ernie4_5_moe": _ernie4_5_moe,
    "glm4_moe": _glm4_moe,
    "dots1": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "gpt_oss": _gpt_oss,
}
"""Reads the config of each family."""


def experts_config(config: Any) -> ExpertsConfig:
    """Read a Hugging Face config.

    Raises:
        InputError: the family's experts are not known here.
    """
    if config.model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise InputError(
            f"the experts of {config.model_type!r} are not known; those of {known} are"
        )
    return FAMILIES[config.model_type](config)
