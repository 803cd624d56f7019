"""GGUF files of tiny models, as llama.cpp's converter would write them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import PreTrainedModel

TYPES: Any = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}

_ROOT = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
}  # fmt: skip


@torch.no_grad()
def write_gguf(
    path: Path,
    model: PreTrainedModel,
    quantized: Any = TYPES.Q8_0,
    head: Any = TYPES.Q8_0,
    fields: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    max_tensors: int = 0,
) -> None:
    """Write a model's weights, which become those of the file.

    Rows of queries and keys of a llama go into the file in llama.cpp's order, those of other
    families as they are.

    quantized: type of the layers' matrices; or by their names in a layer, "attn_k", else Q8_0.
    fields, tensors: of the file, in place of those that the model has, or in addition. A field
    that is None is left out.
    max_tensors: in one of several files; 0: there is one file.
    """
    config = model.config
    family = config.model_type
    names = dict(_ROOT)
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{k}": f"blk.{layer}.{v}" for k, v in _LAYER.items()}
    writer = gguf.GGUFWriter(path, family, split_max_tensors=max_tensors)
    for key, value in {**_fields(config), **(fields or {})}.items():
        key = key.replace("{family}", family)
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_uint32(key, value)
    for name, weight in model.state_dict().items():
        module, ending = name.rsplit(".", 1)
        own = names[module]
        if own == "output" and config.tie_word_embeddings:
            continue
        numbers = weight.numpy()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        num_heads = heads.get(own.split(".")[-1]) if family == "llama" else None
        if num_heads:
            halves = numbers.reshape(num_heads, 2, -1, *numbers.shape[1:])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        if numbers.ndim == 1:
            writer.add_tensor(f"{own}.{ending}", np.ascontiguousarray(numbers))
            continue
        kind = head if own in ("token_embd", "output") else quantized
        if isinstance(kind, Mapping):
            kind = kind.get(own.split(".")[-1], TYPES.Q8_0)
        data = quantized_bytes(numbers, kind)
        writer.add_tensor(f"{own}.{ending}", data, raw_dtype=kind)
        numbers = gguf.dequantize(data, kind)
        if num_heads:
            halves = numbers.reshape(num_heads, -1, 2, *numbers.shape[1:])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        weight.copy_(torch.from_numpy(numbers))
    for name, numbers in (tensors or {}).items():
        writer.add_tensor(name, numbers)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_SCALES: dict[str, dict[int, float]] = {
    "Q2_K": {80: 0.03, 82: 0.04}, "Q3_K": {108: 0.002}, "Q4_K": {0: 0.001, 2: 0.0075},
    "Q5_K": {0: 0.0005, 2: 0.0075}, "Q6_K": {208: 0.0001}, "IQ4_NL": {0: 0.004},
    "IQ4_XS": {0: 0.0003},
}  # fmt: skip
"""Where a block has numbers in fp16, and of which size they are to be."""


def quantized_bytes(numbers: np.ndarray, kind: Any) -> np.ndarray:
    """Return a matrix in the bytes of a type. For types that the gguf package only reads, random
    bytes: numbers of any kind, since a test reads them back."""
    if kind.name not in _SCALES:
        return gguf.quantize(np.ascontiguousarray(numbers), kind)
    columns, size = gguf.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(int(np.abs(numbers).sum() * 1000))
    num_rows, num_columns = numbers.shape
    blocks = rng.integers(0, 256, (num_rows, num_columns // columns, size), dtype=np.uint8)
    for at, scale in _SCALES[kind.name].items():
        own = scale * (1 + rng.random((*blocks.shape[:2], 1)))
        blocks[..., at : at + 2] = own.astype(np.float16).view(np.uint8)
    return blocks.reshape(num_rows, -1)


def _fields(config: Any) -> dict[str, Any]:
    tokens = ["<unk>", "<s>", "</s>", "w", "3", "w3", "3w"]
    tokens += [f"w{token}" for token in range(len(tokens), config.vocab_size)]
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return {
        "{family}.block_count": config.num_hidden_layers,
        "{family}.context_length": config.max_position_embeddings,
        "{family}.embedding_length": config.hidden_size,
        "{family}.feed_forward_length": config.intermediate_size,
        "{family}.attention.head_count": config.num_attention_heads,
        "{family}.attention.head_count_kv": config.num_key_value_heads,
        "{family}.attention.key_length": head_dim,
        "{family}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "{family}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "{family}.rope.dimension_count": head_dim,
        "{family}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": ["w 3", "3 w"],  # of one, older readers make a string
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
