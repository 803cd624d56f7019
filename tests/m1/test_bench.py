"""The bench, run end to end on a tiny model; nothing here depends on how long anything takes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m1_single import LLMEngine, SamplingParams
from milestone_llm.bench.command import main
from milestone_llm.bench.hf_baselines import hf_one_by_one, hf_static, plain_generation
from milestone_llm.bench.measure import (
    Contestant,
    Progress,
    RunResult,
    check_work,
    measure,
    medians,
    percentile,
    short_work,
    speedups,
)
from milestone_llm.bench.report import remarks
from milestone_llm.bench.workloads import WorkItem, mixed
from milestone_llm.models.tiny_models import build_tiny_model

SMALL = ["--model", "tiny-llama", "--num-requests", "5"]
SMALL += ["--input-len", "3", "20", "--output-len", "2", "9"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def run(arguments: list[str], tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "deep" / "bench.json"
    assert main(LLMEngine, [*SMALL, *arguments, "--json", str(path)]) == 0
    return json.loads(path.read_text())


def test_report_says_what_ran_where(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = run(["--seed", "3", "--threads", "1", "--device", "cpu"], tmp_path)
    out = capsys.readouterr().out
    for text in ("mixed, seed 3", "5 requests", "tiny-llama, float32", "threads: 1", "m1_single"):
        assert text in out
    for name in ("torch", "transformers", "python"):
        assert data["environment"][name] in out
    assert all(len(line) <= 80 for line in out.splitlines() if "written" not in line)


def test_steps_and_useful_share_are_the_arithmetic_ones(tmp_path: Path) -> None:
    data = run(["--seed", "1"], tmp_path)
    items = mixed(199, 1, num_requests=5, input_len=(3, 20), output_len=(2, 9))
    inputs = [len(item.prompt) for item in items]
    outputs = [item.params.max_tokens for item in items]
    figures = data["contestants"]["m1_single"]["median"]
    assert figures["steps"] == max(outputs)
    assert figures["rows_per_step"] == 5
    computed = 5 * max(inputs) + 5 * (max(outputs) - 1)
    useful = sum(inputs) + sum(outputs) - 5  # the last token of each is never computed
    assert figures["useful_share"] == pytest.approx(useful / computed)
    assert figures["kv_watermark"] == 5 * (max(inputs) + max(outputs) - 1)
    assert data["workload"]["output_tokens"] == sum(outputs)


def test_baselines_do_the_same_work(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = run(["--baseline", "hf", "--rounds", "2"], tmp_path)
    assert list(data["contestants"]) == ["m1_single", "HF one by one", "HF static batch"]
    assert data["same_tokens"] == {"HF one by one": 5, "HF static batch": 5}
    for contestant in data["contestants"].values():
        assert len(contestant["rounds"]) == 2
        assert {"tok_s", "ttft_p50", "tpot_p95", "itl_p99"} <= set(contestant["median"])
    assert [len(ratio["rounds"]) for ratio in data["speedups"].values()] == [2, 2]
    captured = capsys.readouterr()
    assert "min..max" in captured.out
    assert "against it" in captured.out
    assert captured.err.count("round 2/2") == 3


def test_one_baseline_can_be_chosen(tmp_path: Path) -> None:
    data = run(["--baseline", "static", "static"], tmp_path)
    assert list(data["contestants"]) == ["m1_single", "HF static batch"]


def test_nano_workload_samples(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = run(["--workload", "nano", "--baseline", "static"], tmp_path)
    assert data["workload"]["temperature"] == 0.6
    assert "token for token" not in capsys.readouterr().out  # other random numbers, other tokens


def test_baselines_ignore_eos_and_give_the_config_back() -> None:
    model = build_tiny_model("llama")
    config = model.generation_config
    [free] = LLMEngine(model).generate([[5, 6]], SamplingParams(temperature=0, max_tokens=30))
    model.generation_config.eos_token_id = free.token_ids[0]  # ends at once, unless ignored
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    items = [WorkItem([5, 6], params), WorkItem([7, 8, 9], params)]
    for contestant in (hf_one_by_one(model), hf_static(model, max_num_seqs=2)):
        result = contestant.run(items, lambda count: None)
        check_work(contestant.name, items, result)
        assert result.token_ids[0] == free.token_ids
    assert model.generation_config is config


def test_generation_config_comes_back_after_an_error() -> None:
    model = build_tiny_model("llama")
    config = model.generation_config

    def fail_within() -> None:
        with plain_generation(model, SamplingParams()) as options:
            assert options["top_k"] == 0  # Hugging Face's own default would keep 50
            raise KeyError

    with pytest.raises(KeyError):
        fail_within()
    assert model.generation_config is config


def test_static_baseline_counts_only_own_tokens_and_splits_batches() -> None:
    model = build_tiny_model("llama")
    items = mixed(199, 0, num_requests=5, input_len=(2, 9), output_len=(1, 6))
    counts: list[int] = []
    result = hf_static(model, max_num_seqs=2).run(items, counts.append)
    lengths = [item.params.max_tokens for item in items]
    assert list(map(len, result.token_ids)) == lengths
    assert list(map(len, result.token_times)) == lengths
    assert sum(counts) == sum(lengths)


def fake(name: str, order: list[str], seconds: float = 1.0) -> Contestant:
    def run(items: Any, progress: Progress) -> RunResult:
        order.append(name)
        progress(1)
        return RunResult(seconds, [[0] * item.params.max_tokens for item in items], [])

    return Contestant(name, run)


def test_rounds_are_interleaved_and_turn_round() -> None:
    order: list[str] = []
    done: list[tuple[str, int]] = []
    items = mixed(199, num_requests=2)
    contestants = [fake("a", order, 1.0), fake("b", order, 3.0)]
    results = measure(
        contestants,
        items,
        rounds=3,
        on_run=lambda name, number: lambda count: None,
        on_done=lambda name, number, result: done.append((name, number)),
    )
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"  # the warm-up comes first
    assert done == [("a", 1), ("b", 1), ("b", 2), ("a", 2), ("a", 3), ("b", 3)]
    assert speedups(results["a"], results["b"]) == [3.0] * 3


def test_warm_up_shares_no_prompt_with_the_work() -> None:
    items = mixed(199, num_requests=4)
    for short, item in zip(short_work(items), items, strict=True):
        assert len(short.prompt) == len(item.prompt)
        assert short.prompt != item.prompt
        assert short.params.max_tokens == 4


def test_contestant_that_leaves_work_out_is_an_error() -> None:
    items = mixed(199, num_requests=1)
    with pytest.raises(RuntimeError, match="request 0 got 1 tokens instead of"):
        check_work("lazy", items, RunResult(1.0, [[7]], []))


def test_figures_from_known_times() -> None:
    results = [
        RunResult(seconds, [[1, 2, 3], [4]], [[0.5, 0.6, 0.8], [1.5]])
        for seconds in (2.0, 1.0, 4.0)
    ]
    figures = medians(results)
    assert figures["tok_s"] == 2.0
    assert (figures["tok_s_min"], figures["tok_s_max"]) == (1.0, 4.0)
    assert figures["ttft_p50"] == pytest.approx(1000)
    assert figures["tpot_p50"] == pytest.approx(150)  # one request has a single token, so no TPOT
    assert figures["itl_p99"] == pytest.approx(199)


def test_percentile_interpolates() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([0, 10], 95) == pytest.approx(9.5)
    assert percentile([7], 99) == 7


def test_remarks_say_where_the_engine_loses() -> None:
    ours = {"useful_share": 0.6, "ttft_p50": 90.0, "tpot_p50": 5.0}
    theirs = {"ttft_p50": 10.0, "tpot_p50": 5.0}
    data = {
        "engine": {"milestone": "m1_single"},
        "contestants": {"m1_single": {"median": ours}, "HF": {"median": theirs}},
        "speedups": {"HF": {"median": 0.8}},
        "same_tokens": {"HF": 3},
        "workload": {"num_requests": 4, "temperature": 0},
    }
    padding, slower, late, same = remarks(data)
    assert padding.startswith("40% of the positions")
    assert "0.80x" in slower
    assert "90.0 ms against 10.0 ms" in late
    assert same.startswith("3 of 4 outputs")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--input-len", "9", "3"], "MIN 9 is above MAX 3"),
        (["--set", "seed"], "FIELD=VALUE, got 'seed'"),
        (["--set", "max_num_seq=3"], "did you mean 'max_num_seqs'?"),
        (["--max-model-len", "4"], "max_model_len=4"),
        (["--max-num-batched-tokens", "2"], "max_num_batched_tokens=2"),
        (["--model", "tiny-nothing"], "tiny-llama"),
        (["--dtype", "float7"], "float7"),
    ],
)
def test_bad_values_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(LLMEngine, [*SMALL, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments",
    [["--num-requests", "0"], ["--rounds", "x"], ["--baseline", "vllm"], ["--workload", "none"]],
)
def test_bad_options_end_with_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(LLMEngine, arguments)
    assert ended.value.code == 2
    assert "usage: python -m m1_single.bench" in capsys.readouterr().err
