"""The bench of M5: engines side by side, parts switched off, limits, profiles."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from m5_kernels import LLMEngine
from m5_kernels.backends import Backend
from m5_kernels.bench import main
from m5_kernels.tools.bench_engines import call_in_new_process
from m5_kernels.tools.bench_limits import Bits, limit_text, seconds_at_best
from m5_kernels.tools.bench_parts import OBJECTS
from m5_kernels.tools.measure import Ceilings
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.models.tiny_models import build_tiny_model

pytest_plugins = ["helpers.benches"]
SMALL = ["--model", "tiny-qwen3", "--num-requests", "4", "--device", "cpu", "--no-check"]
SMALL += ["--input-len", "3", "12", "--output-len", "2", "7"]


@pytest.fixture
def bench(run_bench: Any) -> Any:
    """The bench on little work."""
    return lambda *arguments: run_bench(main, *SMALL, *arguments)


def test_the_ladder_does_the_same_work_with_the_same_tokens(bench: Any) -> None:
    data = bench("--engines", "m5", "m2", "m1", "m4", "m3", "--baseline", "static").data
    others = ["HF static batch", "m1_single", "m2_batching", "m3_paged", "m4_prefix_chunked"]
    assert list(data["contestants"]) == ["m5_kernels", *others]
    assert data["same_tokens"] == dict.fromkeys(others, 4)


def test_parts_can_be_switched_off_alone_and_together(bench: Any) -> None:
    everything = "+".join(("graphs", "prefix-cache", *OBJECTS))
    out, _, data, _ = bench("--set", "quantization=int8", "--without", "eight-bits", everything)
    assert "On a CPU there are no graphs" in out
    assert data["same_tokens"][f"- {everything}"] == 4
    assert list(data["contestants"]) == ["m5_kernels", "- eight-bits", f"- {everything}"]
    assert data["engines"]["m5_kernels"]["quantization"] == "int8"


@pytest.mark.parametrize("name", OBJECTS)
@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_a_part_is_switched_off_in_one_engine_which_gives_the_same_tokens(
    name: str, speculation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The objects of a GPU, which hand over to their kernels' twins.
    monkeypatch.setattr("m5_kernels.backends.runs_no_kernels", lambda device: False)
    model = build_tiny_model("qwen3")
    work = [[5, 9, 33] * 4, [7, 40]], SamplingParams(temperature=0, max_tokens=9)
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 64, "speculation": speculation}
    limits["batch_invariant"] = name.startswith("invariant")
    changed: list[bool] = []

    def adapt(chosen: Backend) -> Backend:
        adapted = OBJECTS[name](chosen)
        changed.append(adapted != chosen)
        return adapted

    engines = [LLMEngine(model, adapt_backend=adapt, **limits), LLMEngine(model, **limits)]
    found, expected = ([each.token_ids for each in engine.generate(*work)] for engine in engines)
    assert found == expected
    assert changed == [True]


def test_tokens_are_compared_with_m4_before_anything_is_timed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = [argument for argument in SMALL if argument != "--no-check"]
    assert main(arguments) == 0
    assert "give the same tokens" in capsys.readouterr().out
    monkeypatch.setattr("m5_kernels.sampler.Sampler.sample", lambda self, logits, *_: (
        torch.full((len(logits),), 7, dtype=torch.int32)
    ))  # fmt: skip
    with pytest.raises(RuntimeError, match="M5 does not give the tokens of M4"):
        main(arguments)


@pytest.mark.parametrize("name", ["m4", "m5"])
def test_a_profile_of_any_engine(name: str, bench: Any) -> None:
    out, _, data, _ = bench("--engines", name, "--output-len", "60", "60", "--profile")
    profile = data["profile"]
    assert profile["num_rows"] == 4
    assert f"with 4 rows: {sum(profile['host_us'].values()):,.0f} us" in out
    assert min(profile["host_us"].values()) > 0
    kernels = [us for _, _, us in profile["kernels"]]
    assert kernels == sorted(kernels, reverse=True)
    assert 0 < sum(kernels) < profile["profiled_wall_us"]


def test_a_check_in_a_process_of_its_own_returns_and_raises():
    assert call_in_new_process(os.getpid) != os.getpid()
    with pytest.raises(ValueError, match="invalid literal"):
        call_in_new_process(int, "no number")


def test_limit_counts_weights_a_step_and_kv_a_token() -> None:
    model = build_tiny_model("llama", tie_word_embeddings=True)
    items = [WorkItem([1] * 10, SamplingParams(max_tokens=3))]
    ceilings = Ceilings(read_gbps=1e-9, copy_gbps=1, matmul_tflops=1e-12)
    num_weights = sum(p.numel() for p in model.parameters())
    per_token = num_weights - 199 * 64
    best = seconds_at_best(model, items, num_steps=3, ceilings=ceilings)
    assert best == pytest.approx(
        {
            "weights": 3 * 4 * num_weights,
            "kv": (11 + 12) * 2 * 2 * 2 * 16 * 4,  # k and v, layers, heads, dims, fp32
            "prefill": 2 * per_token * 10 + 2 * 100 * 4 * 16 * 2,
        }
    )
    assert "reached 50% of that" in limit_text(best, ceilings, 2 * sum(best.values()), 3)
    bits = Bits(weights=8, lm_head=0, kv=8)  # fp8: the LM head is exact
    less = seconds_at_best(model, items, num_steps=3, ceilings=ceilings, bits=bits)
    assert less["weights"] == pytest.approx(3 * (per_token + 4 * 199 * 64))
    assert less["kv"] == best["kv"] / 4


def test_limit_counts_the_experts_that_are_met() -> None:
    """A row of one step meets 2 of 8 experts; two rows meet 8 * (1 - (6/8)^2) = 3.5."""
    model = build_tiny_model("qwen3-moe")
    num_weights = sum({p.data_ptr(): p.numel() for p in model.parameters()}.values())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    vocab = model.get_input_embeddings().weight.numel()
    rest = num_weights - experts - (0 if model.config.tie_word_embeddings else vocab)
    ceilings = Ceilings(read_gbps=1e-9, copy_gbps=1, matmul_tflops=1e-12)
    item = WorkItem([1] * 10, SamplingParams(max_tokens=3))
    for num_rows, num_met in ((1, 2), (2, 3.5)):
        best = seconds_at_best(model, [item] * num_rows, num_steps=3, ceilings=ceilings)
        assert best["weights"] == pytest.approx(3 * 4 * (rest + experts * num_met / 8))
    alone = seconds_at_best(model, [item], num_steps=3, ceilings=ceilings)
    heads = model.config.num_attention_heads * model.config.head_dim
    scores = 2 * 100 * heads * model.config.num_hidden_layers
    assert alone["prefill"] == pytest.approx(2 * 10 * (rest + experts / 4 - vocab) + scores)


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--without", "magic"]) == 2
    assert "--without magic: there is graphs" in " ".join(capsys.readouterr().err.split())
