"""Every family of the table against Hugging Face's modules: tokens, logits, eight bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.hunyuan_v1_dense.modeling_hunyuan_v1_dense import (
    HunYuanDenseV1RotaryEmbedding,
)

import m5_kernels
from helpers.engines import greedy, hf_generate, make_engine, random_prompts
from helpers.m5_models import hf_logits, logits_of_steps, rounded
from m5_kernels.decoder.config import DecoderConfig, has_experts
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.decoder.families import FAMILIES
from m5_kernels.extras.experts.config import FAMILIES as WITH_EXPERTS
from m5_kernels.tools.measure import relative_error
from milestone_llm.core.errors import InputError
from milestone_llm.lab.families import build_small_model

ROPE = {"rope_type": "default", "rope_theta": 1e4}
NOT_ROTATED = {**ROPE, "partial_rotary_factor": 0.05}  # less than one of 16
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "a quarter rotated": ("phi3", {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}}),
    "an odd number rotated": (  # 11 of 16: Hugging Face rotates the last with another
        "phi3",
        {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.7}},
    ),
    "all pairs rotated": ("glm4", {"rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}}),
    "multipliers": (
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.6,
            "attention_multiplier": 0.2,
            "logits_scaling": 5.0,
        },
    ),
    "windows and no rope": ("smollm3", {"use_sliding_window": True, "sliding_window": 8}),
    "all layers rotated": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["full_attention"] * 4},
    ),
    "later queries are longer": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 8,
                "llama_4_scaling_beta": 0.8,
            }
        },
    ),
    "no biases": ("starcoder2", {"use_bias": False}),
    "another scale": ("gemma3_text", {"query_pre_attn_scalar": 30}),
    "tied, scaled": ("gemma", {"tie_word_embeddings": True}),
    "tied, transposed": ("gpt2", {"tie_word_embeddings": True}),
    "a field of others": ("gpt2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "ropes by type of others": (
        "llama",
        {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    ),
    "biases of the MLP": ("arcee", {"mlp_bias": True, "attention_bias": True}),
}
if hasattr(HunYuanDenseV1RotaryEmbedding, "compute_ntk_alpha_rope_parameters"):
    # Older releases of transformers call these angles dynamic.
    ALPHA = {**ROPE, "rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0}
    MORE["a larger base"] = ("hunyuan_v1_dense", {"rope_parameters": ALPHA})
CASES = {**{name: (name, {}) for name in FAMILIES}, **MORE}
NEW = [
    name
    for name, (family, _) in CASES.items()
    if not FAMILIES[family].is_lesson and family not in WITH_EXPERTS
]
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def model_of(case: str) -> Any:
    """Return a small model with random norms and biases."""
    family, overrides = CASES[case]
    return build_small_model(family, **overrides)


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_hugging_face(case: str, caplog: pytest.LogCaptureFixture) -> None:
    """In fp32: prompts in chunks, decode rows beside them, contexts longer than the window."""
    model, prompts = model_of(case), random_prompts((3, 21, 9))
    wanted = [hf_generate(model, prompt, 8, eos_token_id=199) for prompt in prompts]
    engine = make_engine(m5_kernels, model, max_num_batched_tokens=16, block_size=4)
    assert isinstance(engine.decoder, FusedDecoder)
    assert [each.token_ids for each in engine.generate(prompts, greedy(8))] == wanted
    assert not [each for each in caplog.records if each.name.startswith("m5_kernels")]


@DEVICES
@pytest.mark.parametrize("case", NEW)
@torch.inference_mode()
def test_in_bf16_logits_are_as_near_the_exact_ones_as_those_of_hugging_face(
    case: str, device: str
) -> None:
    model = model_of(case).bfloat16()
    ids = torch.randint(4, 199, (2, 40), generator=torch.Generator().manual_seed(0))
    exact = hf_logits(copy.deepcopy(model).float(), ids)
    theirs = hf_logits(copy.deepcopy(model).to(device), ids).cpu()
    for seq, logits in enumerate(logits_of_steps(model, ids, device, is_int8=False)):
        wanted = exact[seq][: len(logits)]
        allowed = 1.5 * relative_error(theirs[seq][: len(logits)], wanted)
        assert relative_error(logits, wanted) < allowed


@pytest.mark.parametrize("case", ["phi3", "glm4", "starcoder2"])
@torch.inference_mode()
def test_in_eight_bits_logits_are_those_of_scale_times_integers(case: str) -> None:
    model = model_of(case)
    ids = torch.randint(4, 199, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = hf_logits(rounded(model), ids)
    for seq, logits in enumerate(logits_of_steps(model, ids, "cpu", is_int8=True)):
        wanted = expected[seq][: len(logits)]
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


def test_what_a_family_has_and_the_table_does_not_say_is_refused_by_name() -> None:
    for family, overrides, named in (
        ("gemma3_text", {"attn_logit_softcapping": 50.0}, "soft-capping of scores"),
        ("llama", {"num_hidden_layers": 0}, "0 layers"),
        ("llama", {"is_causal": False}, "attention in both directions"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scores by the number of the layer"),
        ("opt", {"do_layer_norm_before": False}, "norms after the addition"),
        ("opt", {"word_embed_proj_dim": 32}, "an embedding of another size"),
        ("olmo2", {"hidden_act": "gelu"}, "activation 'gelu'"),
        ("opt", {"hidden_size": 60}, "heads of 15 numbers"),
        ("qwen3", {"layer_types": ["chunked_attention"] * 4}, "layers of type chunked_attention"),
        ("olmo3", {"sliding_window": None}, "sliding_attention with a window of None"),
        ("phi3", {"sliding_window": 0}, "sliding_attention with a window of 0"),
        ("gemma3_text", {"query_pre_attn_scalar": -4}, "query_pre_attn_scalar -4"),
        ("ministral3", {"rope_parameters": ROPE}, "without llama_4_scaling_beta"),
        ("glm4", {"rope_parameters": NOT_ROTATED}, "partial_rotary_factor 0.05"),
        ("hunyuan_v1_dense", {"rope_parameters": {"rope_type": "yarn"}}, "what yarn has scaled"),
    ):
        config = build_small_model(family).config
        for name, value in overrides.items():
            setattr(config, name, value)
        with pytest.raises(InputError, match=named):
            DecoderConfig.from_hf(config)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"logit_scale": 0.5, "num_experts_per_tok": 2}),
        ("mistral", {"use_sliding_window": False, "attention_bias": True}),
        ("gemma3_text", {"use_sliding_window": False, "use_qk_norm": False, "mlp_bias": True}),
        ("cohere2", {"rms_norm_eps": 0.5}),
        ("phi3", {"head_dim": 32, "use_sliding_window": False}),
        ("gpt2", {"hidden_act": "relu", "attn_logit_softcapping": 2.0}),
        ("opt", {"hidden_act": "gelu_new", "layer_norm_eps": 0.5}),
    ],
)
@torch.inference_mode()
def test_a_field_of_other_families_changes_nothing(family: str, fields: dict[str, Any]) -> None:
    """A config.json may have any fields. Hugging Face's modules do not read these."""
    model = build_small_model(family, **fields)
    ids = torch.randint(4, 199, (2, 40), generator=torch.Generator().manual_seed(0))
    expected = hf_logits(model, ids)
    assert not has_experts(model.config)
    for seq, logits in enumerate(logits_of_steps(model, ids, "cpu", is_int8=False)):
        wanted = expected[seq][: len(logits)]
        torch.testing.assert_close(logits, wanted, rtol=1e-3, atol=1e-3)


def test_a_window_that_a_family_has_not_frees_no_block(tmp_path: Path) -> None:
    model, prompts = build_small_model("llama"), random_prompts((3, 40))
    wanted = [hf_generate(rounded(model), each, 8, eos_token_id=199) for each in prompts]
    model.config.sliding_window = 5
    model.save_pretrained(tmp_path)
    fields = {"quantization": "int8", "dtype": "float32", "max_model_len": 64, "block_size": 4}
    outputs = make_engine(m5_kernels, str(tmp_path), **fields).generate(prompts, greedy(8))
    assert [each.token_ids for each in outputs] == wanted


def test_the_lesson_alone_does_not_compute_what_needs_other_operations() -> None:
    config = DecoderConfig.from_hf(model_of("multipliers").config)
    with pytest.raises(InputError, match="the lesson's operations do not compute"):
        FusedDecoder(config, torch.zeros(1, 8, 16), torch.float32, "cpu")


@pytest.mark.parametrize(
    ("family", "prefix"),
    [("phi3", ""), ("gpt2", ""), ("gpt2", "transformer."), ("apertus", "")],
)
def test_files_are_read_by_their_own_names(
    family: str, prefix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In eight bits weights come from the files: merged or transposed, one at a time.

    prefix: which those of GPT-2 on the hub leave out.
    """
    model, prompts = build_small_model(family), random_prompts((3, 21))
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {name.removeprefix(prefix): each for name, each in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    tokens = []
    for source, fields in ((str(tmp_path), {"dtype": "float32"}), (model, {})):
        engine = make_engine(m5_kernels, source, quantization="int8", max_model_len=64, **fields)
        tokens.append([each.token_ids for each in engine.generate(prompts, greedy(8))])
    assert tokens[0] == tokens[1]
    assert "does not read" not in caplog.text
    with pytest.raises(InputError, match=f"matrices of {family} are not kept"):
        make_engine(m5_kernels, model, quantization="gguf")
