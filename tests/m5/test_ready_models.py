"""A ready model does what it does, whatever its config says: the fused decoder, or Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import m5_kernels
from helpers.engines import greedy, hf_generate, make_engine
from milestone_llm.core.errors import InputError
from milestone_llm.models.tiny_models import build_tiny_model

PROMPT = [5, 9, 33, 8, 5, 9]


CHANGES: dict[str, Callable[[Any], object]] = {
    "hook": lambda m: m.model.layers[1].mlp.register_forward_hook(
        lambda module, args, output: output * 0.3
    ),
    "scaling": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.75),
    "weight of its own": lambda m: setattr(m.lm_head, "bias", nn.Parameter(torch.randn(199) * 20)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_no_config_says_is_computed_all_the_same(change, caplog):
    model = build_tiny_model("llama")
    CHANGES[change](model)
    wanted = hf_generate(model, PROMPT, 12, eos_token_id=199)
    assert wanted != hf_generate(build_tiny_model("llama"), PROMPT, 12, eos_token_id=199)
    engine = make_engine(m5_kernels, model, max_model_len=64)
    assert engine.generate([PROMPT], greedy(12))[0].token_ids == wanted
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(InputError):
        make_engine(m5_kernels, model, quantization="int8")


@pytest.mark.parametrize(
    ("family", "dtype", "quantization", "max_model_len"),
    [
        ("llama", "float64", None, 2),
        ("mistral", "float16", "int8", 64),
        ("qwen2", "bfloat16", None, 64),
        ("qwen3", "bfloat16", "int8", 2),
    ],
)
def test_a_model_that_is_what_its_config_says_is_fused(
    family, dtype, quantization, max_model_len, caplog
):
    model = build_tiny_model(family).to(getattr(torch, dtype))
    fields = {"quantization": quantization, "max_model_len": max_model_len}
    assert make_engine(m5_kernels, model, **fields).decoder is not None
    assert not caplog.records
