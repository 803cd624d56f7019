"""The bench, run end to end on a tiny model; nothing here depends on how long anything takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from m1_single import LLMEngine, SamplingParams
from m1_single.bench import main
from milestone_llm import MILESTONES
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.lab.bench.hf_baselines import hf_static, plain_generation
from milestone_llm.lab.bench.measure import (
    RunResult,
    ServeWork,
    check_work,
    measure,
    medians,
    percentile,
    run_engine,
    short_work,
    speedups,
)
from milestone_llm.lab.bench.report import losses, same_tokens
from milestone_llm.lab.bench.workloads import Progress, WorkItem, mixed
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
    for text in (
        "mixed, seed 3",
        "5 requests",
        "tiny-llama, float32",
        "1 CPU thread;",
        "m1_single",
    ):
        assert text in " ".join(out.split())
        assert text in markdown
    for name in ("torch", "transformers", "python"):
        assert data["environment"][name] in out
    assert "min..max" not in out  # one round has no spread, and nobody to be compared with
    assert "its seconds" not in out


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
    out, err, data, markdown = run("--baseline", "hf", "--rounds", "2")
    names = ["HF one by one", "HF static batch", "HF continuous"]
    assert list(data["contestants"]) == ["m1_single", *names]
    assert data["same_tokens"] == dict.fromkeys(names, 5)
    for contestant in data["contestants"].values():
        assert len(contestant["rounds"]) == 2
        assert {"tok_s", "ttft_p50", "tpot_p95", "itl_p99"} <= set(contestant["median"])
    assert [len(ratio["rounds"]) for ratio in data["speedups"].values()] == [2, 2, 2]
    for text in ("min..max", "its seconds /", "m1_single's"):
        assert text in out
    assert err.count("round 2/2") == 4
    assert "token for token the same as HF continuous: 5 of 5 outputs" in out
    assert markdown.count("| HF static batch |") == 2  # it has no steps to count


def test_one_baseline_can_be_chosen(run: Any) -> None:
    data = run("--baseline", "static", "static").data
    assert list(data["contestants"]) == ["m1_single", "HF static batch"]


def test_nano_workload_samples(run: Any) -> None:
    bench = run("--workload", "nano", "--baseline", "static")
    assert bench.data["workload"]["temperature"] == 0.6
    assert "token for token" not in bench.out  # other random numbers, other tokens


def test_baselines_ignore_eos_and_give_the_config_back() -> None:
    model = build_tiny_model("llama")
    config = model.generation_config
    [free] = LLMEngine(model).generate([[5, 6]], SamplingParams(temperature=0, max_tokens=30))
    model.generation_config.eos_token_id = free.token_ids[0]  # ends at once, unless ignored
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    items = [WorkItem([5, 6], params), WorkItem([7, 8, 9], params)]
    for max_num_seqs in (1, 2):
        result = hf_static(model, max_num_seqs, items, lambda count: None)
        check_work("HF", items, result)
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
    result = hf_static(model, 2, items, counts.append)
    lengths = [item.params.max_tokens for item in items]
    assert list(map(len, result.token_ids)) == lengths
    assert list(map(len, result.token_times)) == lengths
    assert sum(counts) == sum(lengths)


def test_the_text_of_all_requests_is_part_of_what_is_timed(monkeypatch: Any) -> None:
    engine = LLMEngine(build_tiny_model("llama"))
    items = mixed(engine.vocab_size, num_requests=2, input_len=(2, 4), output_len=(2, 3))
    read = []
    monkeypatch.setattr(RequestOutput, "text", property(lambda output: read.append(1) or "text"))
    result = run_engine(engine, items, lambda count: None)
    assert result.facts["characters"] == 8
    assert len(read) == 2


def fake(name: str, order: list[str], seconds: float = 1.0) -> ServeWork:
    def run(items: Any, progress: Progress) -> RunResult:
        order.append(name)
        progress(1)
        return RunResult(seconds, [[0] * item.params.max_tokens for item in items], [])

    return run


def test_rounds_are_interleaved_and_turn_round(capsys: pytest.CaptureFixture[str]) -> None:
    order: list[str] = []
    items = mixed(199, num_requests=2)
    contestants = {"a": fake("a", order, 1.0), "b": fake("b", order, 3.0)}
    results = measure(contestants, items, rounds=3)
    assert "".join(order) == "ab" + "ab" + "ba" + "ab"  # the warm-up comes first
    lines = [line.split()[1:3] for line in capsys.readouterr().err.splitlines()]
    assert [" ".join(words) for words in lines] == [
        *("1/3 a", "1/3 b"),
        *("2/3 b", "2/3 a"),
        *("3/3 a", "3/3 b"),
    ]
    assert speedups(results) == {"b": {"median": 3.0, "rounds": [3.0] * 3}}


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
    figures = medians([result.figures() for result in results])
    assert figures["tok_s"] == 2.0
    assert (figures["tok_s_min"], figures["tok_s_max"]) == (1.0, 4.0)
    assert figures["ttft_p50"] == pytest.approx(1000)
    assert figures["tpot_p50"] == pytest.approx(150)  # one request has a single token, so no TPOT
    assert figures["itl_p99"] == pytest.approx(199)
    assert figures["ttft_mean"] == pytest.approx(1000)
    assert figures["latency_p95"] == pytest.approx(800 + 0.95 * 700)


def test_percentile_interpolates() -> None:
    assert percentile([3, 1, 2], 50) == 2
    assert percentile([0, 10], 95) == pytest.approx(9.5)
    assert percentile([7], 99) == 7


def test_remarks_say_where_the_engine_loses() -> None:
    ours = {"useful_share": 0.6, "ttft_p50": 90.0, "tpot_p50": 5.0}
    theirs = {"ttft_p50": 10.0, "tpot_p50": 5.0}
    data = {
        "contestants": {name: {"median": own} for name, own in (("m1", ours), ("HF", theirs))},
        "speedups": {"HF": {"median": 0.8}},
        "same_tokens": {"HF": 3},
        "workload": {"num_requests": 4, "temperature": 0},
    }
    assert losses(data)[0].startswith("40% of the positions")
    late = "TTFT p50 90.0 ms against 10.0 ms"
    assert losses(data)[1:] == [f"m1 loses against HF: 0.80x its tok/s, {late}"]
    assert same_tokens(data) == ["token for token the same as HF: 3 of 4 outputs"]
    data["speedups"]["HF"]["median"] = 0.999  # nobody loses 1.00x
    assert losses(data)[1:] == [f"m1 loses against HF: {late}"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
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
    assert main([*SMALL, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--num-requests", "0"],
        ["--rounds", "x"],
        ["--baseline", "vllm"],
        ["--workload", "none"],
        ["--input-len", "9", "3"],
        ["--json", "/dev/null/deep/bench.json"],
    ],
)
def test_bad_options_end_with_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m m1_single.bench" in capsys.readouterr().err


def test_nothing_is_measured_when_a_file_can_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*SMALL, "--markdown", str(tmp_path)])
    assert not capsys.readouterr().out
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    assert main([*SMALL, "--json", str(kept), "--max-model-len", "4"]) == 2
    assert kept.read_text() == "{}"


@pytest.mark.parametrize("milestone", MILESTONES)
def test_help_needs_no_torch(milestone: str) -> None:
    program = "import runpy, sys; sys.modules.update(torch=None, transformers=None)\n"
    program += (
        f"sys.argv = ['bench', '--help']; runpy.run_module('{milestone}.bench', {{}}, '__main__')"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    for option in ("--baseline", "--threads", "--seed", "--json", "--markdown"):
        assert option in run.stdout
