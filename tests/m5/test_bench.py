"""The bench of M5: engines side by side, parts switched off, limits, profiles."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from m5_kernels import LLMEngine
from m5_kernels.bench import main
from m5_kernels.tools.attention_work import Shape
from m5_kernels.tools.bench_limits import RunLimit, limit_text
from m5_kernels.tools.bench_parts import OBJECTS, with_others
from m5_kernels.tools.bench_profile import profile_steps
from m5_kernels.tools.measure import Ceilings
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.bench.measure import RunResult
from milestone_llm.lab.bench.workloads import WorkItem, mixed
from milestone_llm.models.tiny_models import build_tiny_model

pytest_plugins = ["bench_helpers"]
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
    out, _, data, _ = bench("--without", "pipelining", everything)
    names = ["- pipelining", f"- {everything}"]
    assert data["same_tokens"] == dict.fromkeys(names, 4)
    assert data["without"] == ["pipelining", everything]
    assert "On a CPU there are no graphs" in out


def test_eight_bits_are_measured_beside_the_weights_as_they_were(bench: Any) -> None:
    _, _, data, _ = bench("--set", "quantization=int8", "--without", "eight-bits")
    assert list(data["contestants"]) == ["m5_kernels", "- eight-bits"]
    assert data["engine"]["quantization"] == "int8"
    assert data["engines"]["m5_kernels"]["quantization"] == "int8"


def objects_of(engine: Any) -> list[Any]:
    """What parts can be switched off by."""
    decoder, runner = engine.decoder, getattr(engine.runner, "runner", engine.runner)
    of_decoder = [decoder.products, decoder.starts, decoder.gpus, decoder.rope_kv_write]
    return [*of_decoder, runner.device_step.attention.chunks, runner.host_tokens]


@pytest.mark.parametrize("speculation", [None, "ngram"])
def test_a_part_is_switched_off_in_one_engine_which_gives_the_same_tokens(
    speculation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The objects of a GPU, which hand over to their kernels' twins.
    monkeypatch.setattr("m5_kernels.engine.runs_no_kernels", lambda device: False)
    model = build_tiny_model("qwen3")
    work = [[5, 9, 33] * 4, [7, 40]], SamplingParams(temperature=0, max_tokens=9)

    def engine() -> Any:
        return LLMEngine(model, max_num_seqs=4, max_model_len=64, speculation=speculation)

    whole = engine()
    expected = [output.token_ids for output in whole.generate(*work)]
    before = objects_of(whole)
    changed: set[int] = set()
    for name in OBJECTS:
        one = engine()
        own = objects_of(one)
        with with_others([name], one):
            now = objects_of(one)
            found = {place for place, each in enumerate(own) if each is not now[place]}
            assert found, name
            changed |= found
            assert [output.token_ids for output in one.generate(*work)] == expected, name
    assert changed == set(range(len(before)))
    assert all(a is b for a, b in zip(objects_of(whole), before, strict=True))


def test_a_single_request_is_100_tokens_in_and_512_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    served = []

    def measure(contestants: Any, items: Any, *_: Any, **__: Any) -> dict[str, list[RunResult]]:
        served.extend(items)
        facts = {"steps": 1, "rows_per_step": 1, "useful_share": 1, "kv_watermark": 1}
        times = [[0.1 + i for i in range(512)]]
        return {next(iter(contestants)): [RunResult(1.0, [[1] * 512], times, facts)]}

    monkeypatch.setattr("milestone_llm.lab.bench.compare.measure", measure)
    assert main(["--model", "tiny-llama", "--single", "--device", "cpu", "--no-check"]) == 0
    assert [(len(item.prompt), item.params.max_tokens) for item in served] == [(100, 512)]
    assert "512.0" in capsys.readouterr().out


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


def test_profile_of_a_step_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    engine = LLMEngine(build_tiny_model("llama"), max_num_seqs=4, max_model_len=128)
    items = mixed(199, 0, num_requests=3, input_len=(5, 9), output_len=(60, 60))
    result = profile_steps(engine, items, num_steps=5)
    assert result["num_rows"] == 3
    assert f"with 3 rows: {sum(result['host_us'].values()):,.0f} us" in capsys.readouterr().out
    assert min(result["host_us"].values()) > 0
    assert result["kernels"][0][2] >= result["kernels"][-1][2]
    assert not engine.has_unfinished_requests()
    assert engine.stats()["kv"]["used"] == 0


def test_profile_is_printed(bench: Any) -> None:
    out, _, data, _ = bench("--output-len", "60", "60", "--profile")
    assert "on the host" in out
    assert "gaps" in out
    assert data["profile"]["num_rows"] == 4


def test_what_was_measured_is_written_though_the_profile_fails(tmp_path: Path) -> None:
    path = tmp_path / "bench.json"
    assert main([*SMALL, "--profile", "--json", str(path)]) == 2  # too short to be profiled
    assert json.loads(path.read_text())["contestants"]["m5_kernels"]["median"]["tok_s"] > 0


def test_limit_counts_weights_a_step_and_kv_a_token() -> None:
    model = build_tiny_model("llama", tie_word_embeddings=True)
    items = [WorkItem([1] * 10, SamplingParams(max_tokens=3))]
    limit = RunLimit.of(model, items, num_steps=3)
    num_weights = sum(p.numel() for p in model.parameters())
    assert limit.weight_bytes == 3 * 4 * num_weights
    assert limit.kv_bytes == (11 + 12) * 2 * 2 * 2 * 16 * 4  # k and v, layers, heads, dims, fp32
    per_token = num_weights - 199 * 64
    assert limit.prefill_flop == 2 * per_token * 10 + 2 * 100 * 4 * 16 * 2
    seconds = sum(limit.seconds(Ceilings(1e-3, 1e-3, 1e-6)).values())
    lines = limit.beside(Ceilings(1e-3, 1e-3, 1e-6), 2 * seconds, num_tokens=3)
    assert lines["share_of_limit"] == pytest.approx(0.5)
    assert "50%" in limit_text(lines)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--without", "magic"], "--without magic: there is graphs"),
        (["--without", "graphs", "--engines", "m4"], "add m5 to --engines"),
        (["--set", "grafs=1"], "no field 'grafs'"),
        (["--max-model-len", "8"], "max_model_len=8"),
        (["--profile"], "the requests ended before step"),
    ],
)
def test_bad_values_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_any_engine_can_be_profiled(bench: Any) -> None:
    data = bench("--engines", "m4", "--output-len", "60", "60", "--profile").data
    assert data["profile"]["num_rows"] == 4


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["m5_kernels.tools.kernel_bench", "m5_kernels.tools.tune"])
def test_instruments_without_a_gpu_say_so_in_one_line(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--threads", "1"])
    assert importlib.import_module(name).main() == 2
    out, err = capsys.readouterr()
    assert "GPU" in err
    assert (out, err.count("\n")) == ("", 1)


def test_a_chunk_is_rated_by_the_scores_that_it_computes() -> None:
    """A prompt in as long as its two halves: as much work."""
    shapes = [Shape(1, 100, 100), Shape(1, 50, 50), Shape(1, 100, 50)]
    whole, first, second = (shape.speed(128, 1.0) for shape in shapes)
    assert first + second == pytest.approx(whole)
