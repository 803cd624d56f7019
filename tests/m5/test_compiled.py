"""What the chapter hands to the compiler is what M5 computes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from docs.questions import m5_compiled
from docs.questions.m5_compiled import SCOPES, compiled, main, rope_kv_write_pure
from m5_kernels import LLMEngine, SamplingParams
from m5_kernels.decoder import decoder
from m5_kernels.decoder.decoder import FusedDecoder
from m5_kernels.kernels.rope_kv_write import rope_kv_write_torch
from milestone_llm.models.tiny_models import build_tiny_model

pytest_plugins = ["bench_helpers"]
SMALL = ["--model", "tiny-qwen3", "--num-requests", "3", "--device", "cpu", "--no-check"]
SMALL += ["--input-len", "3", "12", "--output-len", "2", "7"]


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """`torch.compile` gives a function back as it is; the names of those that it was given."""
    names: list[str] = []

    def compile_(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        names.append(function.__name__)
        return lambda *args, **options: function(*args, **options)

    monkeypatch.setattr(torch, "compile", compile_)
    return names


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_what_is_compiled_gives_the_same_tokens(
    family: str, scope: str, as_it_is: list[str]
) -> None:
    model = build_tiny_model(family, num_hidden_layers=3)
    prompts = [[(7 * i + j * 3) % 190 + 3 for j in range(3 + 5 * i)] for i in range(4)]
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)

    def tokens() -> list[list[int]]:
        engine = LLMEngine(model, max_num_seqs=3, max_model_len=64, max_num_batched_tokens=16)
        return [output.token_ids for output in engine.generate(prompts, params)]

    before = decoder.rope_kv_write, FusedDecoder.forward
    expected = tokens()
    with compiled(scope):
        assert (decoder.rope_kv_write, FusedDecoder.forward) != before
        assert tokens() == expected
    assert (decoder.rope_kv_write, FusedDecoder.forward) == before
    assert ("_between" in as_it_is) == (scope == "decoder")


def test_the_compiler_can_trace_the_rotation_in_one_piece() -> None:
    trace = partial(torch.compile, backend="eager", fullgraph=True)
    qkv, caches, rest = rope_inputs()
    copies = [cache.clone() for cache in caches]
    expected = rope_kv_write_pure(qkv, *caches, *rest)
    torch.testing.assert_close(trace(rope_kv_write_pure)(qkv, *copies, *rest), expected)
    torch.testing.assert_close(copies, caches)


def rope_inputs() -> tuple[torch.Tensor, list[torch.Tensor], tuple[Any, ...]]:
    """Five tokens, of which the last two are padding; caches of three blocks of four slots."""
    torch.manual_seed(0)
    slots = torch.tensor([5, 2, 11, -1, -1])
    angles = torch.rand(9, 4)
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    positions = torch.tensor([0, 3, 8, 0, 0], dtype=torch.int32)
    caches = [torch.randn(3, 4, 2, 8) for _ in range(2)]
    return torch.randn(5, 8 * 8), caches, (slots, 4, positions, cos_sin, None, None)


def test_padding_is_written_nowhere() -> None:
    qkv, caches, rest = rope_inputs()
    before = [cache.flatten(0, 1).clone() for cache in caches]
    copies = [cache.clone() for cache in caches]
    queries = rope_kv_write_pure(qkv, *caches, *rest)
    assert torch.equal(queries, rope_kv_write_torch(qkv.clone(), *copies, *rest))
    value = qkv.unflatten(1, (8, 8))[:3, 6:]
    for cache, old in zip(caches, before, strict=True):
        found, kept = cache.flatten(0, 1), [slot for slot in range(12) if slot not in (5, 2, 11)]
        assert torch.equal(found[kept], old[kept])
        assert not torch.equal(found[[5, 2, 11]], old[[5, 2, 11]])
    assert torch.equal(caches[1].flatten(0, 1)[[5, 2, 11]], value)


def test_what_was_compiled_is_measured_beside_m5(run_bench: Any, as_it_is: list[str]) -> None:
    out, _, data, _ = run_bench(main, *SMALL, "--compile", "decoder", "twins")
    assert data["same_tokens"] == {"compiled decoder": 3, "compiled twins": 3}
    assert "compiled twins: 0 s in the compiler" in out


def test_without_a_compiler_a_line_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(m5_compiled.shutil, "which", lambda name: None)
    assert main([*SMALL, "--compile", "twins"]) == 2
    assert "install g++ or clang" in " ".join(capsys.readouterr().err.split())
