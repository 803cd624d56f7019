"""Weights in a GGUF file's own bits: the numbers are those that transformers reads from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

import m1_single
import m5_kernels
from m1_single import SamplingParams
from m5_kernels import demo
from m5_kernels.extras.quantization import int4_weight
from m5_kernels.extras.quantization.gguf_file import GGUFFile
from m5_kernels.extras.quantization.int4_weight import Int4Weight
from milestone_llm.core.errors import InputError
from milestone_llm.models.gguf_cache import INDEX, tensor_index
from milestone_llm.models.tiny_models import build_tiny_model

TYPES = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256}


def write(path: Path, model: PreTrainedModel, quantized: TYPES, head: TYPES = TYPES.Q8_0) -> None:
    """A GGUF file of a tiny llama, whose weights become those of the file.

    Rows of queries and keys go into the file in llama.cpp's order.
    """
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    kinds = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for layer in range(config.num_hidden_layers):
        names |= {f"model.layers.{layer}.{k}": f"blk.{layer}.{v}" for k, v in kinds.items()}
    for name, weight in state.items():
        own = names[name.removesuffix(".weight")]
        if own == "output" and config.tie_word_embeddings:
            continue
        numbers = weight.numpy()
        if numbers.ndim == 1:
            writer.add_tensor(f"{own}.weight", numbers)
            continue
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        num_heads = heads.get(own.split(".")[-1])
        if num_heads:
            halves = numbers.reshape(num_heads, 2, -1, numbers.shape[1])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        kind = head if own in ("token_embd", "output") else quantized
        data = gguf.quantize(np.ascontiguousarray(numbers), kind)
        writer.add_tensor(f"{own}.weight", data, raw_dtype=kind)
        numbers = gguf.dequantize(data, kind)
        if num_heads:
            halves = numbers.reshape(num_heads, -1, 2, numbers.shape[1])
            numbers = halves.swapaxes(1, 2).reshape(numbers.shape)
        weight.copy_(torch.from_numpy(numbers))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(params=[(TYPES.Q4_1, True), (TYPES.Q4_0, False), (TYPES.Q8_0, True)], ids=str)
def saved(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, PreTrainedModel]:
    """A file, and the model of its numbers; the folder that it is converted to is there."""
    kind, is_tied = request.param
    model = build_tiny_model("llama", tie_word_embeddings=is_tied, **SIZES)
    with torch.no_grad():
        write(tmp_path / "tiny.gguf", model, kind)
    folder = tmp_path / "converted"
    model.save_pretrained(folder)
    (folder / INDEX).write_text(json.dumps(tensor_index(tmp_path / "tiny.gguf")))
    monkeypatch.setattr(
        "milestone_llm.models.checkpoint.converted_folder", lambda path, key: folder
    )
    return tmp_path / "tiny.gguf", model


def test_a_file_has_the_weights_of_the_model(saved: tuple[Path, Any]) -> None:
    path, model = saved
    state = dict(model.named_parameters())
    weights = dict(GGUFFile(path, tensor_index(path)))
    assert set(weights) == set(state)
    for name, weight in weights.items():
        assert torch.equal(weight[(slice(None),) * len(weight.shape)], state[name])


@pytest.mark.parametrize("num_tokens", [1, 7, 130])
def test_products(saved: tuple[Path, Any], num_tokens: int) -> None:
    assert 7 < int4_weight.MANY_ROWS < 130
    weights = GGUFFile(saved[0], tensor_index(saved[0])).weights
    merged = Int4Weight(128, 64)
    names = [f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv"]
    for part, name in zip(merged.split([64, 32, 32]), names, strict=True):
        part.stored = weights[name].int4_groups
    state = saved[1].state_dict()
    numbers = torch.cat([state[name] for name in names]).double()
    for dtype, most in ((torch.float32, 1e-6), (torch.bfloat16, 8e-3)):
        hidden, bias = torch.randn(num_tokens, 64).to(dtype), torch.randn(128).to(dtype)
        wanted = hidden.double() @ numbers.T + bias.double()
        product = merged.product(hidden, bias)
        assert product.dtype == dtype
        assert (product - wanted).norm() / wanted.norm() < most


def test_tokens_are_those_of_the_model_with_the_same_numbers(saved: tuple[Path, Any]) -> None:
    path, model = saved
    prompts = [[7, 3, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    wanted = m1_single.LLMEngine(model, device="cpu").generate(prompts, params)
    engine = m5_kernels.LLMEngine(str(path), quantization="gguf", dtype="float32", device="cpu")
    outputs = engine.generate(prompts, params)
    assert [each.token_ids for each in outputs] == [each.token_ids for each in wanted]
    engine = m5_kernels.LLMEngine(str(path), quantization="gguf", device="cpu")
    assert engine.decoder.embedding.dtype == torch.bfloat16  # unless told otherwise
    assert all(len(each.token_ids) == 8 for each in engine.generate(prompts, params))


@pytest.mark.usefixtures("no_pixels")
def test_the_demo_ends_with_the_bits_of_the_file(
    saved: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", str(saved[0]), "--max-tokens", "4", "--out", str(tmp_path)]
    assert demo.main(options) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "M4 and M5 gave the same tokens" in out
    rates = re.search(r"Tokens a second: M4 [\d.,]+, M5 [\d.,]+, M5 in few bits [\d.,]+", out)
    assert rates, out
    assert demo.main([*options, "--quantization", "gguf", "--no-m4"]) == 0
    assert "weights in the file's own bits" in " ".join(capsys.readouterr().out.split())


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gguf"):
        m5_kernels.LLMEngine("tiny-llama", quantization="gguf", device="cpu")
    with pytest.raises(InputError, match="tensor_parallel_size"):
        m5_kernels.EngineConfig(quantization="gguf", tensor_parallel_size=2)
    model = build_tiny_model("llama", **SIZES)
    with torch.no_grad():
        write(tmp_path / "tiny.gguf", model, TYPES.Q5_0)
    with pytest.raises(InputError, match="Q5_0"):
        GGUFFile(tmp_path / "tiny.gguf", tensor_index(tmp_path / "tiny.gguf"))
