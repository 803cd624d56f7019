"""fp8: weights in e4m3, activations with a scale for each token, keys and values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import m5_kernels
from helpers.engines import assert_empty, greedy, hf_generate, make_engine, random_prompts
from helpers.m5_models import with_biases
from m5_kernels.extras.quantization.fp8_rows import RoundedRows
from m5_kernels.extras.quantization.fp8_weight import E4M3, LARGEST, Fp8Weight
from milestone_llm.core.errors import InputError


def fp8_engine(model: Any, **fields: Any) -> Any:
    fields = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 64, **fields}
    return make_engine(m5_kernels, model, **fields)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def in_e4m3(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.clamp(-LARGEST, LARGEST).to(E4M3).to(numbers.dtype)


def rounded_model(model: Any, rounds_one_row: bool) -> Any:
    """Return a copy of Hugging Face's modules with rounded weights, that rounds activations."""
    model = copy.deepcopy(model)

    def round_input(_: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        (hidden,) = inputs
        rows = hidden.flatten(0, -2)
        if len(rows) == 1 and not rounds_one_row:
            return hidden
        values, scale = RoundedRows.round(rows)
        return (values.to(hidden.dtype) * scale[:, None]).view_as(hidden)

    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for merged in (
            [attention.q_proj, attention.k_proj, attention.v_proj],
            [attention.o_proj],
            [mlp.gate_proj, mlp.up_proj],
            [mlp.down_proj],
        ):
            scale = torch.stack([each.weight.abs().amax() for each in merged]).amax() / LARGEST
            scale = scale.float()
            for each in merged:
                each.weight.data = in_e4m3(each.weight.float() / scale).to(each.weight) * scale
                each.register_forward_pre_hook(round_input)
    return model


def test_a_merged_weight_has_one_scale_in_whatever_order_its_parts_come() -> None:
    matrix = torch.randn(20, 48) * torch.logspace(-2, 1, 20)[:, None]
    whole = Fp8Weight(20, 48, torch.float32, "cpu")
    whole.round_from(matrix)
    parts = Fp8Weight(20, 48, torch.float32, "cpu")
    for part, rows in zip(parts.split([7, 13])[::-1], matrix.split([7, 13])[::-1], strict=True):
        part.fill(rows)
    assert torch.equal(parts.values.float(), whole.values.float())
    assert torch.equal(parts.scale, matrix.abs().amax() / LARGEST)
    is_normal = matrix.abs() / whole.scale >= 2**-6
    error = (whole.values.float() * whole.scale - matrix).abs() / matrix.abs()
    assert error[is_normal].max() <= 2**-4


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_are_those_of_the_rounded_model(family: str) -> None:
    model = with_biases(family).double()
    prompt, other = random_prompts([9, 9], seed=4)
    alone = fp8_engine(model, quantization="fp8").generate([prompt], greedy(8))
    reference = rounded_model(model, rounds_one_row=False)
    assert tokens(alone) == [hf_generate(reference, prompt, 8, eos_token_id=999)]
    reference = rounded_model(model, rounds_one_row=True)
    expected = [hf_generate(reference, each, 8, eos_token_id=999) for each in (prompt, other)]
    engine = fp8_engine(model, quantization="fp8")
    assert tokens(engine.generate([prompt, other], greedy(8))) == expected
    assert_empty(engine)


def rounded_kv(module: Any, query: Any, key: Any, value: Any, *args: Any, **fields: Any) -> Any:
    key, value = in_e4m3(key), in_e4m3(value)
    return sdpa_attention_forward(module, query, key, value, *args, **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_cache_tokens": 96, "preemption": "swap", "async_scheduling": True},
        {"kv_cache_tokens": 96, "max_num_batched_tokens": 8},
        {"speculation": "ngram", "num_speculative_tokens": 3},
    ],
    ids=str,
)
def test_tokens_are_those_of_rounded_keys_and_values(fields: dict[str, Any]) -> None:
    """Whoever reads a key or value finds the same number, so nothing depends on the batch."""
    AttentionInterface.register("sdpa_rounded_kv", rounded_kv)
    model = with_biases("qwen3").double()
    reference = copy.deepcopy(model)
    reference.config._attn_implementation = "sdpa_rounded_kv"
    prompts = random_prompts([5, 30, 9, 30], seed=4)
    expected = [hf_generate(reference, prompt, 8, eos_token_id=999) for prompt in prompts]
    assert expected != [hf_generate(model, prompt, 8, eos_token_id=999) for prompt in prompts]
    engine = fp8_engine(model, kv_cache_dtype="fp8", **fields)
    for _ in range(2):  # the second time by what the prefix cache has
        assert tokens(engine.generate(prompts, greedy(8))) == expected
    assert_empty(engine)
    if "kv_cache_tokens" in fields:
        assert engine.stats()["preemptions"] > 0


def test_a_token_takes_a_byte_a_number() -> None:
    plain, fp8 = (fp8_engine("tiny-llama", kv_cache_dtype=kind) for kind in ("auto", "fp8"))
    sizes = [engine.stats()["kv"]["bytes_per_token"] for engine in (plain, fp8)]
    assert sizes[0] == 4 * sizes[1]
    assert fp8.runner.cache.keys[0].dtype == E4M3


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="tensor_parallel_size"):
        m5_kernels.EngineConfig(quantization="fp8", tensor_parallel_size=2)
    with pytest.raises(InputError, match="kv_cache_dtype"):
        m5_kernels.EngineConfig(kv_cache_dtype="fp4")
    with pytest.raises(InputError, match="float16"):
        fp8_engine("tiny-llama", quantization="fp8", dtype="float16", device="cpu")
