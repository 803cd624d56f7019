"""Weights in a GGUF file's own bits: the numbers are those that transformers reads from it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import PreTrainedModel

import m1_single
import m5_kernels
from gguf_helpers import SIZES, TYPES, write_gguf
from m1_single import SamplingParams
from m5_kernels import demo
from m5_kernels.extras.quantization import int4_weight
from m5_kernels.extras.quantization.gguf_file import FileWeight, GGUFFile, TensorLocation
from m5_kernels.extras.quantization.int4_weight import Int4Weight
from milestone_llm.core.errors import InputError
from milestone_llm.models.gguf_cache import INDEX, tensor_index
from milestone_llm.models.tiny_models import build_tiny_model


@pytest.fixture(params=[(TYPES.Q4_1, True), (TYPES.Q4_0, False), (TYPES.Q8_0, True)], ids=str)
def saved(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, PreTrainedModel]:
    """A file, and the model of its numbers; the folder that it is converted to is there."""
    kind, is_tied = request.param
    model = build_tiny_model("llama", tie_word_embeddings=is_tied, **SIZES)
    with torch.no_grad():
        write_gguf(tmp_path / "tiny.gguf", model, kind)
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


@pytest.mark.parametrize("kind", [TYPES.Q4_0, TYPES.Q4_1, TYPES.Q8_0], ids=str)
def test_unpacking_for_many_rows_loses_no_more_than_the_product_of_few(
    kind: TYPES, tmp_path: Path
) -> None:
    data = gguf.quantize(torch.randn(128, 256).numpy(), kind)
    data.tofile(tmp_path / "matrix")
    location = TensorLocation(kind.name, (128, 256), 0, data.nbytes)
    weight = Int4Weight(128, 256, FileWeight(tmp_path / "matrix", location, None).int4_groups)
    hidden = torch.randn(130, 256).bfloat16()
    wanted = hidden.double() @ torch.from_numpy(gguf.dequantize(data, kind)).double().T
    few = torch.cat([weight.product(hidden[:65]), weight.product(hidden[65:])])
    errors = [(product - wanted).norm() for product in (few, weight.product(hidden))]
    assert errors[1] < 1.5 * errors[0]


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
        write_gguf(tmp_path / "tiny.gguf", model, TYPES.Q5_0)
    with pytest.raises(InputError, match="Q5_0"):
        GGUFFile(tmp_path / "tiny.gguf", tensor_index(tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("other", ["attn_k", "ffn_up"])
def test_four_and_eight_bits_in_one_product_are_refused(
    other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    write_gguf(tmp_path / "tiny.gguf", build_tiny_model("llama", **SIZES), {other: TYPES.Q4_1})
    with pytest.raises(InputError, match="as many bits"):
        m5_kernels.LLMEngine(str(tmp_path / "tiny.gguf"), quantization="gguf", device="cpu")
