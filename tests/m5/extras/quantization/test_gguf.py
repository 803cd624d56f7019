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
from gguf_helpers import SIZES, TYPES, quantized_bytes, write_gguf
from m1_single import SamplingParams
from m5_kernels import demo
from m5_kernels.extras.quantization import int4_weight
from m5_kernels.extras.quantization.gguf_file import FileWeight, GGUFFile, TensorLocation
from m5_kernels.extras.quantization.gguf_words import EXACT, int4_groups
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
    monkeypatch.setattr("milestone_llm.models.checkpoint.config_folder", lambda path, key: folder)
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


def test_a_file_whose_logits_are_no_numbers_is_refused(saved: tuple[Path, Any]) -> None:
    path, _ = saved
    norm = tensor_index(path)["tensors"]["output_norm.weight"]
    with path.open("r+b") as file:
        file.seek(norm[2])
        file.write(b"\xff" * norm[3])
    with pytest.raises(InputError, match="only NaN for logits"):
        m5_kernels.LLMEngine(str(path), quantization="gguf", device="cpu")


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
    with pytest.raises(InputError, match="no whole groups of 32"):
        int4_groups(torch.zeros(2, 48, dtype=torch.uint8), "F16", 24)


WIDE = {**SIZES, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
KINDS = [
    "Q4_0",
    "Q4_1",
    "Q4_K",
    "Q5_0",
    "Q5_1",
    "Q5_K",
    "Q8_0",
    "Q6_K",
    "F16",
    "BF16",
    "F32",
    "Q2_K",
    "Q3_K",
    "IQ4_NL",
    "IQ4_XS",
    "MXFP4",
]


@pytest.mark.parametrize("name", KINDS)
def test_words_of_each_type_are_its_numbers_or_the_nearest(name: str) -> None:
    kind = TYPES[name]
    data = quantized_bytes(torch.randn(48, 512).numpy(), kind)
    wanted = torch.from_numpy(gguf.dequantize(data, kind).astype("float32"))
    rows = torch.from_numpy(data).contiguous().view(torch.uint8)
    groups = int4_groups(rows, name, 512)
    numbers = groups.weights(torch.float32).unflatten(0, (-1, 512)).sum(0).T
    most = 1e-6 if name in EXACT else 6e-3
    assert (numbers - wanted).norm() / wanted.norm() < most
    hidden = torch.randn(7, 512).bfloat16()
    product = Int4Weight(48, 512, groups).product(hidden)
    exact = hidden.double() @ wanted.double().T
    assert (product - exact).norm() / exact.norm() < 1e-2


def all_logprobs(engine: Any) -> torch.Tensor:
    """What an engine computes of all tokens of a prompt."""
    prompt = [list(range(3, 40))]
    params = SamplingParams(prompt_logprobs=-1, max_tokens=1)
    found = engine.generate(prompt, params)[0].prompt_logprobs
    return torch.tensor([[row[token].logprob for token in range(256)] for row in found[1:]])


@pytest.mark.parametrize(
    ("kinds", "most"),
    [
        ({"attn_k": "Q4_1", "ffn_up": "Q4_0"}, 1e-4),  # four bits and eight in one product
        ({"attn_q": "Q4_K", "attn_k": "Q4_K", "attn_v": "Q5_K", "ffn_down": "Q5_0"}, 1e-4),
        (  # as in a file of Q4_K_M
            dict.fromkeys(["attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"], "Q4_K")
            | dict.fromkeys(["attn_v", "ffn_down", "head"], "Q6_K"),
            0.03,
        ),
        (dict.fromkeys(["attn_q", "attn_k", "attn_v", "ffn_up"], "BF16"), 0.03),
    ],
)
def test_mixed_and_split_files_give_the_logits_of_their_numbers(
    kinds: dict[str, str],
    most: float,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model = build_tiny_model("llama", **WIDE)
    types = {name: TYPES[kind] for name, kind in kinds.items()}
    head = types.get("head", TYPES.Q8_0)
    write_gguf(tmp_path / "tiny.gguf", model, types, head=head, max_tensors=9)
    first, *others = sorted(tmp_path.glob("*.gguf"))
    assert len(others) == 2
    options: dict[str, Any] = {"quantization": "gguf", "dtype": "float32", "device": "cpu"}
    engine = m5_kernels.LLMEngine(str(others[0]), **options)
    assert not list(tmp_path.rglob("*.safetensors"))  # weights are in the GGUF file alone
    wanted = all_logprobs(m1_single.LLMEngine(model, device="cpu"))
    error = (all_logprobs(engine) - wanted).norm() / wanted.norm()
    assert error < most
    is_rounded = any(kind not in EXACT for kind in kinds.values())
    assert ("are rounded to 8 bits" in caplog.text) == is_rounded
    others[1].unlink()
    with pytest.raises(InputError, match=f"{others[1].name} is missing"):
        m5_kernels.LLMEngine(str(first), **options)
