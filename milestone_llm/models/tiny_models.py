"""Tiny models with random weights, one for each model family, for tests and for a first look.

They are real Hugging Face models of a few layers. Each has what makes its family different (sliding
windows, query/key norms, learned positions), so that an engine that runs all of them has handled
every case. They know no language: there is no tokenizer, and prompts are token ids.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from milestone_llm.core.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

VOCAB_SIZE = 199  # odd and prime: an engine that assumes a multiple of 8 fails here
BOS_TOKEN_ID, EOS_TOKEN_ID, PAD_TOKEN_ID = 1, 2, 0

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    "bos_token_id": BOS_TOKEN_ID,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": PAD_TOKEN_ID,
    # Tied weights would make the last token the likeliest next one.
    "tie_word_embeddings": False,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128}

TINY_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED,
    "qwen2": {**_GROUPED, "use_sliding_window": False},
    "qwen3": {**_GROUPED, "use_sliding_window": False},
    "mistral": {**_GROUPED, "sliding_window": 24},
    "qwen3-moe": {
        **_GROUPED,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "gemma3": {
        **_GROUPED,
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "query_pre_attn_scalar": 16,
    },
    "gpt-oss": {
        **_GROUPED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    },
    "deepseek-v3": {
        **_COMMON,
        "num_key_value_heads": 4,
        "intermediate_size": 128,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 48,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
    "opt": {**_COMMON, "ffn_dim": 128, "word_embed_proj_dim": 64, "dropout": 0.0},
    "gpt2": _COMMON,
}
"""Config of each family of `build_tiny_model`."""

_MODEL_TYPES = {
    "gemma3": "gemma3_text",
    "deepseek-v3": "deepseek_v3",
    "gpt-oss": "gpt_oss",
    "qwen3-moe": "qwen3_moe",
}
_INIT_STD = 0.25  # so large that greedy outputs vary, and do not repeat one token

_SEEDING = threading.Lock()
"""transformers draws weights from torch's default generator, which all threads share."""


def build_tiny_model(family: str, seed: int = 0, **config_overrides: Any) -> PreTrainedModel:
    """Build a tiny model of a family with random float32 weights on the CPU.

    The same family, seed and overrides give the same weights with the same torch. The global state
    of random number generators does not change.

    Args:
        family: a key of `TINY_FAMILIES`, such as "llama".
        seed: seed of the weights.
        config_overrides: fields of the family's Hugging Face config, such as `head_dim=32`.

    Raises:
        InputError: the family is not known; the message lists the known ones.
    """
    if family not in TINY_FAMILIES:
        known = ", ".join(f"tiny-{name}" for name in TINY_FAMILIES)
        raise InputError(f"there is no tiny model 'tiny-{family}'; there are {known}")
    fields = {"initializer_range": _INIT_STD, **TINY_FAMILIES[family], **config_overrides}
    if family == "opt":
        fields.setdefault("init_std", fields.pop("initializer_range"))
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(_MODEL_TYPES.get(family, family), **fields)
    with _SEEDING, torch.random.fork_rng(devices=[]), torch.device("cpu"):
        # Not torch.manual_seed: that would seed the generators of all GPUs, too.
        torch.default_generator.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model.eval().requires_grad_(False)
