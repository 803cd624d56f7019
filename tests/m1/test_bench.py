"""The bench, run end to end on a tiny model; nothing here depends on how long anything takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m1_single import LLMEngine
from m1_single.bench import main
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.lab.bench.hf_baselines import hf_static
from milestone_llm.lab.bench.measure import (
    RunResult,
    check_work,
    measure,
    medians,
    run_engine,
    short_work,
    speedups,
)
from milestone_llm.lab.bench.workloads import WorkItem, mixed
from milestone_llm.models.tiny_models import build_tiny_model

pytest_plugins = ["bench_helpers"]
SMALL = ["--model", "tiny-llama", "--num-requests", "5"]
SMALL += ["--input-len", "3", "20", "--output-len", "2", "9"]


@pytest.fixture
def run(run_bench: Any) -> Any:
    """The bench on little work."""
    return lambda *arguments: run_bench(main, *SMALL, *arguments)


def test_report_says_what_ran_where(run: Any) -> None:
    out, _, data, markdown = run("--seed", "3", "--threads", "1", "--device", "cpu")
    for text in ("mixed, seed 3", "5 requests", "tiny-llama, float32", "1 CPU thread;"):
        assert text in " ".join(out.split())
        assert text in markdown
    for name in ("torch", "transformers", "python"):
        assert data["environment"][name] in out


def test_steps_and_useful_share_are_the_arithmetic_ones(run: Any) -> None:
    data = run("--seed", "1").data
    items = mixed(199, 1, num_requests=5, input_len=(3, 20), output_len=(2, 9))
    inputs = [len(item.prompt) for item in items]
    outputs = [item.params.max_tokens for item in items]
    figures = data["contestants"]["m1_single"]["median"]
    assert figures["steps"] == max(outputs)
    assert figures["rows_per_step"] == 5
    assert figures["tokens_per_step"] == sum(outputs) / max(outputs)
    computed = 5 * max(inputs) + 5 * (max(outputs) - 1)
    useful = sum(inputs) + sum(outputs) - 5  # the last token of each is never computed
    assert figures["useful_share"] == pytest.approx(useful / computed)
    assert figures["kv_watermark"] == 5 * (max(inputs) + max(outputs) - 1)
    assert data["workload"]["output_tokens"] == sum(outputs)


def test_baselines_do_the_same_work(run: Any) -> None:
    out, _, data, markdown = run("--baseline", "hf", "--rounds", "2")
    names = ["HF one by one", "HF static batch", "HF continuous"]
    assert list(data["contestants"]) == ["m1_single", *names]
    assert data["same_tokens"] == dict.fromkeys(names, 5)
    for contestant in data["contestants"].values():
        assert len(contestant["rounds"]) == 2
        assert {"tok_s", "ttft_p50", "tpot_p95", "itl_p99"} <= set(contestant["median"])
    assert [len(ratio["rounds"]) for ratio in data["speedups"].values()] == [2, 2, 2]
    assert "token for token the same as HF continuous: 5 of 5 outputs" in out
    assert markdown.count("| HF static batch |") == 2  # it has no steps to count


def test_nano_workload_samples(run: Any) -> None:
    bench = run("--workload", "nano", "--baseline", "static")
    assert bench.data["workload"]["temperature"] == 0.6
    assert "token for token" not in bench.out  # other random numbers, other tokens


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_the_static_baseline_takes_own_lengths_ignores_eos_and_gives_the_config_back(
    max_num_seqs: int,
) -> None:
    model = build_tiny_model("llama")
    config = model.generation_config
    items = mixed(199, 0, num_requests=5, input_len=(2, 9), output_len=(1, 6))
    prompt, params = items[0].prompt, replace(items[0].params, max_tokens=6)
    [free] = LLMEngine(model).generate([prompt], params)
    model.generation_config.eos_token_id = free.token_ids[0]  # ends at once, unless ignored
    items[0] = WorkItem(prompt, params)
    counts: list[int] = []
    result = hf_static(model, max_num_seqs, items, counts.append)
    check_work("HF", items, result)
    assert result.token_ids[0] == free.token_ids
    assert list(map(len, result.token_times)) == [item.params.max_tokens for item in items]
    assert sum(counts) == sum(map(len, result.token_ids))
    assert model.generation_config is config


def test_the_text_of_all_requests_is_part_of_what_is_timed(monkeypatch: Any) -> None:
    engine = LLMEngine(build_tiny_model("llama"))
    items = mixed(engine.vocab_size, num_requests=2, input_len=(2, 4), output_len=(2, 3))
    read = []
    monkeypatch.setattr(RequestOutput, "text", property(lambda output: read.append(1) or "text"))
    result = run_engine(engine, items, lambda count: None)
    assert result.facts["characters"] == 8
    assert len(read) == 2


def test_rounds_are_interleaved_and_turn_round() -> None:
    order: list[str] = []
    items = mixed(199, num_requests=2)

    def contestant(name: str, seconds: float) -> Any:
        def serve(items: Any, progress: Any) -> RunResult:
            order.append(name)
            return RunResult(seconds, [[0] * item.params.max_tokens for item in items], [])

        return serve

    results = measure({"a": contestant("a", 1.0), "b": contestant("b", 3.0)}, items, rounds=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"  # the warm-up comes first
    assert speedups(results) == {"b": {"median": 3.0, "rounds": [3.0] * 3}}
    with pytest.raises(RuntimeError, match="request 0 got 1 tokens instead of"):
        check_work("lazy", items[:1], RunResult(1.0, [[7]], []))


def test_warm_up_shares_no_prompt_with_the_work() -> None:
    items = mixed(199, num_requests=4)
    for short, item in zip(short_work(items), items, strict=True):
        assert len(short.prompt) == len(item.prompt)
        assert short.prompt != item.prompt
        assert short.params.max_tokens == 4


def test_figures_from_known_times() -> None:
    results = [
        RunResult(seconds, [[1, 2, 3], [4]], [[0.5, 0.6, 0.8], [1.5]])
        for seconds in (2.0, 1.0, 4.0)
    ]
    figures = medians([result.figures() for result in results])
    assert figures["tok_s"] == 2.0
    assert (figures["tok_s_min"], figures["tok_s_max"]) == (1.0, 4.0)
    assert figures["ttft_p50"] == pytest.approx(1000)
    assert figures["tpot_p50"] == pytest.approx(150)  # one request has a single token, so no TPOT
    assert figures["itl_p99"] == pytest.approx(199)
    assert figures["ttft_mean"] == pytest.approx(1000)
    assert figures["latency_p95"] == pytest.approx(800 + 0.95 * 700)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "seed"], "FIELD=VALUE, got 'seed'"),
        (["--set", "max_num_seq=3"], "did you mean 'max_num_seqs'?"),
        (["--max-model-len", "4"], "max_model_len=4"),
        (["--baseline", "vllm"], "usage: python -m m1_single.bench"),
        (["--input-len", "9", "3"], "usage: python -m m1_single.bench"),
        (["--markdown", "/dev/null/bench.md"], "usage: python -m m1_single.bench"),
    ],
)
def test_bad_options_end_before_the_work_and_leave_files_as_they_are(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    try:
        status = main([*SMALL, "--json", str(kept), *arguments])
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())
    assert kept.read_text() == "{}"
