"""A ready model does what it does, whatever its config says: the fused decoder, or Hugging Face."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

import m5_kernels
from engine_helpers import greedy, hf_generate, make_engine
from milestone_llm.core.errors import InputError
from milestone_llm.models.tiny_models import build_tiny_model

PROMPT = [5, 9, 33, 8, 5, 9]


class NegatedModel(LlamaForCausalLM):
    def forward(self, *args: Any, **keywords: Any) -> Any:
        output = super().forward(*args, **keywords)
        output.logits = -output.logits
        return output


def scaled(factor: float) -> Callable[..., Any]:
    """A forward hook."""
    return lambda module, args, output: output * factor


def halve_input(module: Any, args: Any, keywords: Any) -> Any:
    return args, {**keywords, "hidden_states": keywords["hidden_states"] * 0.5}


def take_class(module: Any, kind: type) -> None:
    module.__class__ = kind


CHANGES: dict[str, Callable[[Any], object]] = {
    "hook on an MLP": lambda m: m.model.layers[1].mlp.register_forward_hook(scaled(0.3)),
    "hook before attention": lambda m: m.model.layers[0].self_attn.register_forward_pre_hook(
        halve_input, with_kwargs=True
    ),
    "scaling": lambda m: setattr(m.model.layers[0].self_attn, "scaling", 0.75),
    "activation": lambda m: setattr(m.model.layers[0].mlp, "act_fn", nn.GELU()),
    "forward of its own": lambda m: take_class(m, NegatedModel),
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
    if change != "activation":  # rounding changes as much
        with pytest.raises(InputError):
            make_engine(m5_kernels, model, quantization="int8")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", "float64"), ("mistral", "float16"), ("qwen2", "bfloat16"), ("qwen3", "bfloat16")],
)
@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("max_model_len", [2, 64])
def test_a_model_that_is_what_its_config_says_is_fused(
    family, dtype, quantization, max_model_len, caplog
):
    model = build_tiny_model(family).to(getattr(torch, dtype))
    fields = {"quantization": quantization, "max_model_len": max_model_len}
    assert make_engine(m5_kernels, model, **fields).decoder is not None
    assert not caplog.records
