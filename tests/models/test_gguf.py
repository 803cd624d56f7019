"""Models of GGUF files are those that the files describe, in all milestones, or are refused.

M1 to M4 take the converted file, as M5 does unless it is told to keep the file's bits.
"""

from __future__ import annotations

import copy
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.gguf import gguf_tokenizer_mapping

import m1_single
import m5_kernels
from helpers.engines import greedy
from milestone_llm.core.errors import InputError
from milestone_llm.lab import cache
from milestone_llm.models.checkpoint import load_model, stop_token_ids
from milestone_llm.models.gguf_cache import cache_directory
from milestone_llm.models.gguf_metadata import complete_config
from milestone_llm.models.pretrained import build_empty_model
from milestone_llm.models.tiny_models import build_tiny_model

pytest.importorskip("gguf")

from gguf_helpers import SIZES, TYPES, write_gguf
from helpers.m5_models import with_biases

PROMPTS = [list(range(3, 63)), [9, 8, 7]]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def tokens_of(engine: Any) -> list[list[int]]:
    return [output.token_ids for output in engine.generate(PROMPTS, greedy(10))]


def engines(path: Path) -> list[Any]:
    """M1's engine, and M5's with the bits of the file."""
    own_bits: dict[str, Any] = {"quantization": "gguf", "dtype": "float32", "device": "cpu"}
    return [m1_single.LLMEngine(path, device="cpu"), m5_kernels.LLMEngine(str(path), **own_bits)]


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_weights_go_to_their_places_in_each_architecture(family: str, tmp_path: Path) -> None:
    # transformers' reader knows Qwen 3 with heads of 128 alone.
    model = with_biases(family, **{**SIZES, "head_dim": 128 if family == "qwen3" else 16})
    write_gguf(tmp_path / "tiny.gguf", model)
    wanted = tokens_of(m1_single.LLMEngine(model, device="cpu"))
    for engine in engines(tmp_path / "tiny.gguf"):
        assert tokens_of(engine) == wanted


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "int8", "fp8"])
def test_a_gpu_computes_what_the_file_has(quantization: str | None, tmp_path: Path) -> None:
    model = build_tiny_model("llama", **SIZES)
    write_gguf(tmp_path / "tiny.gguf", model)
    settings: dict[str, Any] = {"quantization": quantization, "dtype": "float32"}
    if quantization == "fp8":
        settings["dtype"] = "bfloat16"
    model = model.to("cuda", getattr(torch, settings["dtype"]))
    wanted = tokens_of(m5_kernels.LLMEngine(model, **settings))
    engine = m5_kernels.LLMEngine(str(tmp_path / "tiny.gguf"), device="cuda", **settings)
    assert tokens_of(engine) == wanted


def test_the_cache_of_converted_files_is_listed_and_cleared(tmp_path: Path, capsys: Any) -> None:
    write_gguf(tmp_path / "tiny.gguf", build_tiny_model("llama", **SIZES))
    load_model(tmp_path / "tiny.gguf", device="cpu")
    for options, kept in (([], True), (["--clear"], False)):
        assert cache.main(options) == 0
        assert "tiny-" in capsys.readouterr().out
        folders = [path for path in cache_directory().iterdir() if path.is_dir()]
        assert bool(folders) is kept


# --- positions -----------------------------------------------------------------------------


def llama3_factors(factor: float, original: int) -> np.ndarray:
    """What llama.cpp's converter computes from a `rope_scaling` of Llama 3.1 (heads of 16)."""
    factors = []
    for index in range(8):
        wavelength = 2 * math.pi * 10000 ** (index / 8)
        smooth = min(max((original / wavelength - 1) / 3, 0), 1)
        factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
LINEAR: dict[str, Any] = {
    "{family}.rope.scaling.type": "linear",
    "{family}.rope.scaling.factor": 4.0,
}
YARN: dict[str, Any] = {
    "{family}.rope.scaling.type": "yarn",
    "{family}.rope.scaling.factor": 4.0,
    "{family}.rope.scaling.original_context_length": 64,
}
FREQS = "rope_freqs.weight"
SCALED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "linear": (LINEAR, {}, {"rope_type": "linear", "factor": 4.0}),
    "linear, in old files": (
        {"{family}.rope.scale_linear": 4.0},
        {},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "linear, by factors": (
        {},
        {FREQS: np.full(8, 4, np.float32)},
        {"rope_type": "linear", "factor": 4.0},
    ),
    "yarn": (
        YARN,
        {},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "Llama 3.1": ({}, {FREQS: llama3_factors(8, 256)}, {**LLAMA3, "factor": 8.0}),
    "Llama 3.2": ({}, {FREQS: llama3_factors(32, 256)}, {**LLAMA3, "factor": 32.0}),
}


@pytest.mark.parametrize("kind", SCALED)
def test_scaled_positions_are_those_of_the_file(kind: str, tmp_path: Path) -> None:
    fields, tensors, scaling = SCALED[kind]
    model = build_tiny_model("llama", **SIZES)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, model, fields=fields, tensors=tensors)
    config = copy.deepcopy(model.config)
    config.rope_parameters = {**config.rope_parameters, **scaling}
    scaled = type(model)(config).eval().requires_grad_(False)
    scaled.load_state_dict(model.state_dict())
    ids = torch.tensor([PROMPTS[0]])
    assert (model(ids).logits - scaled(ids).logits).abs().max() > 0.5
    torch.testing.assert_close(
        load_model(path, device="cpu").model(ids).logits, scaled(ids).logits, atol=2e-3, rtol=0
    )
    wanted = tokens_of(m1_single.LLMEngine(scaled, device="cpu"))
    for engine in engines(path):
        assert tokens_of(engine) == wanted


@pytest.mark.parametrize(
    ("fields", "tensors"),
    [
        ({"{family}.rope.scaling.type": "none"}, {}),
        ({**LINEAR, "{family}.rope.scaling.factor": 1.0}, {}),
        ({}, {FREQS: np.ones(8, np.float32)}),
    ],
)
def test_positions_that_are_not_scaled_stay(
    fields: dict[str, Any], tensors: dict[str, Any], tmp_path: Path
) -> None:
    model = build_tiny_model("llama", **SIZES)
    write_gguf(tmp_path / "tiny.gguf", model, fields=fields, tensors=tensors)
    wanted = tokens_of(m1_single.LLMEngine(model, device="cpu"))
    for engine in engines(tmp_path / "tiny.gguf"):
        assert tokens_of(engine) == wanted


def test_a_window_of_the_file_is_that_of_the_model(tmp_path: Path) -> None:
    config = {**SIZES, "num_hidden_layers": 2, "sliding_window": 8, "pad_token_id": 0}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("phi3", **config)).eval()
    write_gguf(
        tmp_path / "tiny.gguf", model, TYPES.F32, TYPES.F32,
        fields={"{family}.attention.sliding_window": 8, "tokenizer.ggml.padding_token_id": 0},
    )  # fmt: skip
    ids = torch.tensor([PROMPTS[0]])
    torch.testing.assert_close(
        load_model(tmp_path / "tiny.gguf", device="cpu").model(ids).logits, model(ids).logits
    )


class Metadata:
    """A GGUF file's reader that knows some keys."""

    def __init__(self, **values: Any) -> None:
        self.tensors: list[Any] = []
        self.fields = {key: self.Field(value) for key, value in values.items()}

    class Field:
        def __init__(self, value: Any) -> None:
            self.contents = lambda: value


@pytest.mark.parametrize(
    ("family", "fields", "wanted"),
    [
        ("gemma2", {"attn_logit_softcapping": 20.0}, {"attn_logit_softcapping": 20.0}),
        ("gemma2", {"final_logit_softcapping": 9.0}, {"final_logit_softcapping": 9.0}),
        ("gemma2", {}, {"query_pre_attn_scalar": 128}),
        ("gemma2", {"layers": 46}, {"query_pre_attn_scalar": 64}),
        ("gemma3", {"layers": 62}, {"query_pre_attn_scalar": 64}),
        (
            "gemma3",
            {"layers": 3, "attention.sliding_window_pattern": 2},
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
        (
            "gemma3",
            {"layers": 2, "attention.sliding_window_pattern": [False, True]},
            {"layer_types": ["full_attention", "sliding_attention"]},
        ),
    ],
)
def test_a_gemma_has_the_caps_scales_and_windows_of_its_file(
    family: str, fields: dict[str, Any], wanted: dict[str, Any]
) -> None:
    fields = dict(fields)
    sizes = {"num_hidden_layers": fields.pop("layers", 2), "hidden_size": 512, "head_dim": 128}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 256}
    kind = "gemma3_text" if family == "gemma3" else family
    model = build_empty_model(AutoConfig.for_model(kind, **sizes), torch.float32, "cpu")
    own = {f"{family}.{key}": value for key, value in fields.items()}
    complete_config(model, Metadata(**{"general.architecture": family}, **own))
    assert {name: getattr(model.config, name) for name in wanted} == wanted


def test_layers_with_a_window_have_the_positions_of_the_file() -> None:
    config = AutoConfig.for_model("gemma3_text", num_hidden_layers=2, vocab_size=256)
    model = build_empty_model(config, torch.float32, "cpu")
    complete_config(
        model, Metadata(**{"general.architecture": "gemma3", "gemma3.rope.freq_base_swa": 500.0})
    )
    assert model.config.rope_parameters["sliding_attention"]["rope_theta"] == 500.0


def test_of_a_folder_with_a_file_the_file_is_asked_for(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", build_tiny_model("llama", **SIZES))
    with pytest.raises(InputError, match=r"GGUF file as the model, .*tiny.gguf$"):
        load_model(tmp_path, device="cpu")


# --- refusals ------------------------------------------------------------------------------

BIAS = {"blk.0.attn_q.bias": np.ones(64, np.float32)}
LAYER = {f"blk.2.{name}.weight": np.ones(64, np.float32) for name in ("attn_norm", "ffn_norm")}
HALF = np.array([1, 1, 1, 1, 8, 8, 2, 2], np.float32)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "longrope": ({**YARN, "{family}.rope.scaling.type": "longrope"}, {}, "longrope"),
    "yarn of its own": (
        {**YARN, "{family}.rope.scaling.yarn_log_multiplier": 0.1},
        {},
        "yarn_log_multiplier",
    ),
    "yarn without a factor": ({"{family}.rope.scaling.type": "yarn"}, {}, "yarn"),
    "a factor that is none": ({**LINEAR, "{family}.rope.scaling.factor": math.nan}, {}, "nan"),
    "longer scores": ({"{family}.rope.scaling.attn_factor": 2.0}, {}, "attn_factor"),
    "scaled scores": ({"{family}.attention.scale": 0.5}, {}, "attention.scale is 0.5"),
    "capped scores": ({"{family}.attn_logit_softcapping": 30.0}, {}, "attn_logit_softcapping"),
    "a window": ({"{family}.attention.sliding_window": 8}, {}, "sliding_window is 8"),
    "both directions": ({"{family}.attention.causal": 0}, {}, "causal"),
    "factors of nobody": ({}, {FREQS: HALF}, FREQS),
    "long factors": ({}, {"rope_factors_long.weight": HALF}, "rope_factors_long.weight"),
    "both": (LINEAR, {FREQS: llama3_factors(8, 256)}, "both"),
    "a bias": ({}, BIAS, "blk.0.attn_q.bias"),
    "a norm": ({}, {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}, "attn_q_norm"),
    "a scale": ({}, {"blk.1.ffn_up.scale": np.ones(1, np.float32)}, "blk.1.ffn_up.scale"),
    "a layer more": ({}, LAYER, "block_count is 2, and there are tensors of layer 2"),
    "unknown words": ({"tokenizer.ggml.pre": "deepseek-v9"}, {}, "pre is 'deepseek-v9'"),
    "half of the layers": ({"{family}.block_count": 1}, {}, "block_count is 1"),
    "layers too many": ({"{family}.block_count": 3}, {}, "lacks|weights are missing"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_file_of_which_only_a_part_would_be_taken_is_refused(kind: str, tmp_path: Path) -> None:
    fields, tensors, message = REFUSED[kind]
    path = tmp_path / "tiny.gguf"
    write_gguf(path, build_tiny_model("llama", **SIZES), fields=fields, tensors=tensors)
    for milestone, options in ((m1_single, {}), (m5_kernels, {"quantization": "gguf"})):
        with pytest.raises(InputError, match=message) as error:
            milestone.LLMEngine(str(path), device="cpu", **options)
        assert "\n" not in str(error.value)


def test_a_file_that_rotates_half_of_a_head_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    fields = {"{family}.rope.dimension_count": 8}
    write_gguf(path, build_tiny_model("qwen2", **SIZES), fields=fields)
    with pytest.raises(InputError, match=r"rope.dimension_count is 8, and qwen2 rotates 16"):
        m1_single.LLMEngine(str(path), device="cpu")


def test_a_file_whose_tensors_share_bytes_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, build_tiny_model("llama", **SIZES))
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_down.weight"
    place = content.index(name) + len(name) + 4 + 2 * 8 + 4  # dimensions, sizes, type
    content[place : place + 8] = (
        int.from_bytes(content[place : place + 8], "little") + 32
    ).to_bytes(8, "little")
    path.write_bytes(content)
    for milestone, options in ((m1_single, {}), (m5_kernels, {"quantization": "gguf"})):
        with pytest.raises(InputError, match=r"blk.0.ffn_down.weight and \S+ share bytes"):
            milestone.LLMEngine(str(path), device="cpu", **options)


@pytest.mark.parametrize("key", ["head_count_kv", "layer_norm_rms_epsilon"])
def test_a_file_that_lacks_a_number_is_refused(key: str, tmp_path: Path) -> None:
    path, name = tmp_path / "tiny.gguf", f"{{family}}.attention.{key}"
    write_gguf(path, build_tiny_model("llama", **SIZES), fields={name: None})
    with pytest.raises(InputError, match=f"the file lacks llama.attention.{key}"):
        m1_single.LLMEngine(str(path), device="cpu")


@pytest.mark.parametrize(
    ("sizes", "fields"),
    [
        ({"hidden_size": 96, "num_attention_heads": 3, "head_dim": 32}, {}),
        ({}, {"{family}.attention.layer_norm_rms_epsilon": math.nan}),
    ],
    ids=["heads", "nan"],
)
def test_numbers_that_make_no_model_are_refused_when_it_is_loaded(
    sizes: dict[str, int], fields: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, build_tiny_model("llama", **{**SIZES, **sizes}), fields=fields)
    for milestone, options in (
        (m1_single, {}),
        (m5_kernels, {}),
        (m5_kernels, {"quantization": "gguf"}),
        (m5_kernels, {"quantization": "int8"}),
    ):
        with pytest.raises(InputError):
            milestone.LLMEngine(str(path), device="cpu", **options)


# --- tokens --------------------------------------------------------------------------------

TOKENS = ["<unk>", "<s>", "</s>", "w", "\u0120", "1", "11", "\u0120w", "ww", "www"]
MERGES = ["1 1", "\u0120 w", "\u0120 \u0120"]
KNOWS_LLAMA_3 = hasattr(gguf_tokenizer_mapping, "GGUF_PRE_TOKENIZER_SPLITS")
WORDS: dict[str, list[str]] = {
    # how the words of "w  11 www" are split, and merged
    "gpt-2": ["w", "\u0120", "\u0120", "11", "\u0120w", "w", "w"],
    "smollm": ["w", "\u0120\u0120", "1", "1", "\u0120w", "w", "w"],
    "llama-bpe": ["<s>", "w", "\u0120", "\u0120", "11", "\u0120www"],
}


@pytest.mark.parametrize("kind", WORDS)
def test_text_is_split_into_the_words_that_the_file_says(kind: str, tmp_path: Path) -> None:
    tokens = [*TOKENS, "\u0120\u0120", "\u0120www"]
    fields = {
        "tokenizer.ggml.pre": kind,
        "tokenizer.ggml.tokens": [*tokens, *(f"x{i}" for i in range(len(tokens), 256))],
        "tokenizer.ggml.merges": MERGES,
    }
    write_gguf(tmp_path / "tiny.gguf", build_tiny_model("llama", **SIZES), fields=fields)
    if kind == "llama-bpe" and not KNOWS_LLAMA_3:
        with pytest.raises(InputError, match="a newer one may know it"):
            load_model(tmp_path / "tiny.gguf", device="cpu")
        return
    tokenizer: Any = load_model(tmp_path / "tiny.gguf", device="cpu").tokenizer
    assert tokenizer.convert_ids_to_tokens(tokenizer("w  11 www").input_ids) == WORDS[kind]


@pytest.mark.skipif(not KNOWS_LLAMA_3, reason="this transformers does not know its words")
def test_the_beginning_of_a_text_is_marked_unless_the_file_says_no(tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    write_gguf(tmp_path / "tiny.gguf", build_tiny_model("llama", **SIZES), fields=fields)
    tokenizer: Any = load_model(tmp_path / "tiny.gguf", device="cpu").tokenizer
    assert tokenizer("w").input_ids == [3]


def test_a_space_that_the_file_does_not_want_is_not_added(tmp_path: Path) -> None:
    tokens = ["<unk>", "<s>", "</s>", "w", "\u2581", "\u2581w", "ww"]
    tokens += [f"x{i}" for i in range(len(tokens), 256)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-each) for each in range(256)],
        "tokenizer.ggml.merges": ["\u2581 w", "w w"],
        "tokenizer.ggml.add_space_prefix": False,
    }
    write_gguf(tmp_path / "tiny.gguf", build_tiny_model("llama", **SIZES), fields=fields)
    with pytest.raises(InputError, match=r"add_space_prefix is false"):
        load_model(tmp_path / "tiny.gguf", device="cpu")


# --- ends of a text, and the cache ---------------------------------------------------------


def test_a_text_ends_at_each_token_that_the_file_names(tmp_path: Path) -> None:
    ends = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 11}
    model = build_tiny_model("llama", **SIZES)
    for name, fields, wanted in (
        ("all", ends, {2, 7, 11}),
        ("outside", {"tokenizer.ggml.eot_token_id": 300}, {2}),
    ):
        write_gguf(tmp_path / f"{name}.gguf", model, fields=fields)
        for engine in engines(tmp_path / f"{name}.gguf"):
            assert stop_token_ids(engine.model) == wanted
            assert engine.eos_token_ids == wanted


@pytest.mark.parametrize("keeps_times", [False, True])
def test_a_file_that_is_rewritten_with_the_same_size_is_read_again(
    keeps_times: bool, tmp_path: Path
) -> None:
    path = tmp_path / "tiny.gguf"
    models = [build_tiny_model("llama", seed=seed, **SIZES) for seed in range(2)]
    sizes = set()
    for model in models:
        before = path.stat() if path.exists() else None
        write_gguf(path, model)
        if before is not None and keeps_times:  # as some programs that copy do
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        sizes.add(path.stat().st_size)
        loaded = load_model(path, device="cpu").model
        assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert len(sizes) == 1
