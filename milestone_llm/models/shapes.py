"""Models of real size with random weights, for measurements: `random-qwen3-8b` and similar.

Speed depends on shapes and not on the values of weights, so nothing needs to be downloaded. Use
`ignore_eos`: their text has no meaning, and no end.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig, PretrainedConfig

from milestone_llm.core.errors import InputError

PREFIX = "random-"

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
}


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, is_tied: bool = False) -> dict[str, Any]:
    return {
        **_QWEN3,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "tie_word_embeddings": is_tied,
    }


_QWEN3_30B_A3B = {
    **_qwen3(2048, 6144, 48, 32),
    "model_type": "qwen3_moe",
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, is_tied=True),
    "qwen3-8b": _qwen3(4096, 12_288, 36, 32),
    "qwen3-32b": _qwen3(5120, 25_600, 64, 64),
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "gpt-oss-20b": {"model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32},
}
"""Fields of the Hugging Face config of each shape."""


def shape_config(name: str) -> PretrainedConfig:
    """Return the config of a shape, such as `qwen3-8b`.

    Raises:
        InputError: there is no such shape.
    """
    if name not in SHAPES:
        known = ", ".join(PREFIX + each for each in SHAPES)
        raise InputError(f"there is no model {PREFIX + name!r}; there are {known}")
    return AutoConfig.for_model(**SHAPES[name])
