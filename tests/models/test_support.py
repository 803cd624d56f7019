"""What an engine refuses at load, by name, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, AutoModelForSequenceClassification

from helpers.engines import every_milestone, greedy, make_engine, random_prompts
from milestone_llm.models.support import LAYER_TYPES, check_flat, check_padded
from milestone_llm.models.tiny_models import build_tiny_model

SMALL = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    """Config fields of a rotary embedding of some type."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **fields}}


ZERO = {"rope_type": "default", "rope_theta": 0}
LONGROPE = rope(
    "longrope",
    short_factor=[1.0] * 8,
    long_factor=[4.0] * 8,
    original_max_position_embeddings=32,
    factor=4.0,
)
LLAMA3 = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
    "factor": 2.0,
}


@every_milestone
@pytest.mark.parametrize("fields", [rope("dynamic", factor=2.0), LONGROPE], ids=["dynamic", "long"])
def test_rope_that_looks_at_other_requests_is_refused(package: Any, fields: dict[str, Any]) -> None:
    model = build_tiny_model("llama", **fields)
    kind = fields["rope_parameters"]["rope_type"]
    with pytest.raises(ValueError, match=rf"model type llama.*type '{kind}'.*longest position"):
        package.LLMEngine(model)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"rope_parameters": ZERO}),
        ("llama", rope("linear", factor=0.0)),
        ("gemma3", {"rope_parameters": dict.fromkeys(LAYER_TYPES, ZERO)}),
    ],
)
def test_rope_whose_angles_are_no_numbers_is_refused(family: str, fields: dict[str, Any]) -> None:
    model = build_tiny_model(family, **fields)
    for check in (check_flat, check_padded):
        with pytest.raises(ValueError, match="angles that are no numbers: rope_parameters are"):
            check(model)


@every_milestone
@pytest.mark.parametrize(
    "fields",
    [rope("linear", factor=2.0), rope("yarn", factor=2.0), rope("llama3", **LLAMA3)],
    ids=["linear", "yarn", "llama3"],
)
def test_rope_that_depends_on_a_token_s_own_position_is_served(
    package: Any, fields: dict[str, Any]
) -> None:
    engine = make_engine(package, build_tiny_model("llama", **fields), max_model_len=64)
    prompts = random_prompts([3, 40])
    together = [output.token_ids for output in engine.generate(prompts, greedy(6))]
    assert together == [engine.generate(prompt, greedy(6))[0].token_ids for prompt in prompts]


@every_milestone
def test_what_is_no_causal_language_model_is_refused(package: Any) -> None:
    config = AutoConfig.for_model("llama", **SMALL, intermediate_size=32, pad_token_id=0)
    t5 = AutoConfig.for_model("t5", vocab_size=99, d_model=32, d_kv=16, num_layers=1, num_heads=2)
    for model in (
        AutoModelForSequenceClassification.from_config(config),
        AutoModel.from_config(config),
        AutoModel.from_config(AutoConfig.for_model("bert", **SMALL)),
        AutoModel.from_config(t5),
    ):
        with pytest.raises(ValueError, match=f"model type {model.config.model_type}"):
            package.LLMEngine(model)


def test_whatever_a_model_raises_when_tried_is_a_refusal() -> None:
    model = build_tiny_model("llama")
    model.model.layers[1].mlp.forward = lambda *_: 1 / 0
    for check in (check_flat, check_padded):
        with pytest.raises(
            ValueError, match=r"LlamaForCausalLM \(model type llama\).*ZeroDivision"
        ):
            check(model)


def test_a_layer_that_looks_at_its_neighbour_is_refused() -> None:
    """A token shift, as in RWKV: nothing in the config tells of it."""
    model = build_tiny_model("llama")
    mlp = model.model.layers[0].mlp
    own_forward = mlp.forward
    mlp.forward = lambda hidden: own_forward(hidden + hidden.roll(1, dims=1))
    with pytest.raises(ValueError, match="other logits in a flat batch"):
        check_flat(model)


def test_a_model_that_attends_to_what_follows_is_refused() -> None:
    model = build_tiny_model("llama")
    model.config.is_causal = False
    for check in (check_flat, check_padded):
        with pytest.raises(ValueError, match="cannot be served"):
            check(model)


class WindowlessConfig:
    """A config that keeps its window to itself."""

    sliding_window = None

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return WindowlessConfig, (self._config,)


def test_a_window_of_thousands_is_read_off_the_mask() -> None:
    """The layer is not told of its window, and no prompt that is tried is as long."""
    model = build_tiny_model("mistral", sliding_window=700)
    check_flat(model)
    for layer in model.model.layers:
        layer.self_attn.config = WindowlessConfig(model.config)
    with pytest.raises(ValueError, match="a sliding window of 700 that attention is not told of"):
        check_flat(model)


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_holds_no_token_is_refused(window: int) -> None:
    """A row that attends to nothing is an average to Hugging Face, and NaN to other code."""
    with pytest.raises(ValueError, match=f"a sliding window of {window}$"):
        check_flat(build_tiny_model("mistral", sliding_window=window))


@every_milestone
@pytest.mark.parametrize("window", [11, 700])
def test_a_window_that_layers_do_not_read_is_refused(package: Any, window: int) -> None:
    kinds = ["sliding_attention", "full_attention"]
    model = build_tiny_model("llama", sliding_window=window, layer_types=kinds)
    with pytest.raises(ValueError, match=f"a sliding window of {window} that"):
        package.LLMEngine(model)
    check_padded(build_tiny_model("mistral", sliding_window=window))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_rounded_weights_are_no_reason_to_refuse(dtype: torch.dtype) -> None:
    model = build_tiny_model("gemma3").to(dtype)
    check_flat(model)
    check_padded(model)
