"""The benches on a tiny model, and what chapters measured with them. M5's is in `m5`.

No measured time is judged.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from docs.questions import m3_layouts, m4_measured
from helpers.benches import BenchRun
from m1_single import LLMEngine
from milestone_llm import MILESTONES
from milestone_llm.frontend.outputs import RequestMetrics, RequestOutput
from milestone_llm.lab.bench.hf_baselines import hf_continuous, hf_static
from milestone_llm.lab.bench.measure import (
    RunResult,
    check_work,
    gap_figures,
    measure,
    medians,
    run_engine,
    short_work,
    speedups,
)
from milestone_llm.lab.bench.workloads import WorkItem, mixed
from milestone_llm.models.tiny_models import build_tiny_model

pytest_plugins = ["helpers.benches"]

MAINS = {name[:2]: importlib.import_module(f"{name}.bench").main for name in MILESTONES[:4]}
SMALL = ["--model", "tiny-llama", "--num-requests", "5"]
SMALL += ["--input-len", "3", "20", "--output-len", "2", "9"]
Bench = Callable[..., BenchRun]


def test_the_report_says_what_ran_where_and_figures_are_the_arithmetic_ones(
    run_bench: Bench,
) -> None:
    options = ["--seed", "1", "--threads", "1", "--device", "cpu"]
    out, _, data, markdown = run_bench(MAINS["m1"], *SMALL, *options)
    for text in ("mixed, seed 1", "5 requests", "tiny-llama, float32", "1 CPU thread;"):
        assert text in " ".join(out.split())
        assert text in markdown
    for name in ("torch", "transformers", "python"):
        assert data["environment"][name] in out

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


@pytest.mark.parametrize(
    ("milestone", "baseline", "names"),
    [
        ("m1", "hf", ["HF one by one", "HF static batch", "HF continuous"]),
        ("m2", "continuous", ["HF continuous"]),
        ("m3", "static", ["HF static batch"]),
        ("m4", "m3", ["m3_paged"]),
    ],
)
def test_the_baseline_does_the_same_work(
    run_bench: Bench, milestone: str, baseline: str, names: list[str]
) -> None:
    options = ["--baseline", baseline, "--rounds", "2"]
    out, _, data, markdown = run_bench(MAINS[milestone], *SMALL, *options)
    assert list(data["contestants"])[1:] == names
    assert data["same_tokens"] == dict.fromkeys(names, 5)
    for contestant in data["contestants"].values():
        assert len(contestant["rounds"]) == 2
        assert {"tok_s", "ttft_p50", "tpot_p95", "itl_p99"} <= set(contestant["median"])
    assert all(len(ratio["rounds"]) == 2 for ratio in data["speedups"].values())
    assert f"token for token the same as {names[-1]}: 5 of 5 outputs" in " ".join(out.split())
    assert f"| {names[-1]} |" in markdown


def test_nano_workload_samples(run_bench: Bench) -> None:
    bench = run_bench(MAINS["m1"], *SMALL, "--workload", "nano", "--baseline", "static")
    assert bench.data["workload"]["temperature"] == 0.6
    assert "token for token" not in bench.out  # other random numbers, other tokens


@pytest.mark.parametrize("max_num_seqs", [1, 2, None], ids=["1", "2", "continuous"])
def test_hugging_face_takes_own_lengths_ignores_eos_and_gets_its_config_back(
    max_num_seqs: int | None,
) -> None:
    model = build_tiny_model("llama")
    config = model.generation_config
    items = mixed(199, 0, num_requests=5, input_len=(2, 9), output_len=(1, 6))
    items[0] = WorkItem(items[0].prompt, replace(items[0].params, max_tokens=6))
    [free] = LLMEngine(model).generate([items[0].prompt], items[0].params)
    config.eos_token_id = [*range(100), *free.token_ids]  # ends at once, unless ignored
    counts: list[int] = []
    if max_num_seqs is None:  # fewer rows than requests
        engine = importlib.import_module("m2_batching").LLMEngine(
            model, max_num_seqs=3, max_model_len=32
        )
        result = hf_continuous(engine, items, counts.append)
    else:
        result = hf_static(model, max_num_seqs, items, counts.append)
    check_work("HF", items, result)
    assert result.token_ids[0] == free.token_ids
    lengths = [item.params.max_tokens for item in items]
    assert list(map(len, result.token_times)) == lengths
    assert all(times == sorted(times) and times[0] > 0 for times in result.token_times)
    assert sum(counts) == sum(lengths)
    assert model.generation_config is config
    assert model.config._attn_implementation == "sdpa"


def test_the_text_of_all_requests_is_part_of_what_is_timed(monkeypatch: Any) -> None:
    engine = LLMEngine(build_tiny_model("llama"))
    items = mixed(engine.vocab_size, num_requests=2, input_len=(2, 4), output_len=(2, 3))
    monkeypatch.setattr(RequestOutput, "text", "text")
    assert run_engine(engine, items, lambda count: None).facts["characters"] == 8


def test_rounds_are_interleaved_and_turn_round_behind_a_warm_up_of_other_prompts() -> None:
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


def test_gaps_are_taken_of_all_requests_together() -> None:
    def outputs(*token_times: list[float]) -> list[RequestOutput]:
        return [
            RequestOutput("r", [1], [], RequestMetrics(0.0, None, each)) for each in token_times
        ]

    gaps = gap_figures(outputs([0.0, 1.0, 2.0], [5.0], [0.0, 4.0], []))
    assert (gaps["gap_p50"], gaps["gap_max"]) == (1000.0, 4000.0)
    assert 1000.0 < gaps["gap_p99"] <= 4000.0
    assert gap_figures(outputs([1.0])) == {"gap_p50": 0.0, "gap_p99": 0.0, "gap_max": 0.0}


# --- what chapters compare ----------------------------------------------------------------------

LAYOUTS = ["--model", "tiny-llama", "--num-requests", "12", "--max-model-len", "128"]
LAYOUTS += ["--input-len", "16", "40", "--output-len", "16", "30", "--device", "cpu"]
TINY = ["--model", "tiny-llama", "--rounds", "1"]


def test_blocks_serve_more_requests_from_the_same_memory(run_bench: Bench) -> None:
    out, _, data, _ = run_bench(m3_layouts.main, *LAYOUTS, "--rounds", "1")
    block, region, short = (own["median"] for own in data["contestants"].values())
    assert (region["max_concurrent"], region["total"], region["peak_used"]) == (4, 4, 4)
    assert (block["max_concurrent"], block["total"]) == (12, 4 * 128 // 16)
    assert region["num_tokens"] == block["num_tokens"]
    assert region["waste_share"] > 0.5
    assert block["waste_per_request"] <= 16 / 2 + 1
    length = data["engines"][list(data["contestants"])[2]]["max_model_len"]
    assert length <= 40 + 30, "regions of the longest request are measured, too"
    assert short["max_concurrent"] == 4 * 128 // length
    assert "token for token the same as region: 12 of 12 outputs" in " ".join(out.split())


def test_too_little_memory_for_all_and_memory_for_all(run_bench: Bench) -> None:
    data = run_bench(m3_layouts.main, *LAYOUTS, "--rounds", "1", "--kv-cache-tokens", "200").data
    figures = data["contestants"]["block"]["median"]
    assert figures["num_preemptions"] > 0
    assert figures["peak_used"] == 12
    equal = ["--equal-concurrency", "--rounds", "1", "--block-size", "24"]
    data = run_bench(m3_layouts.main, *LAYOUTS, *equal).data
    region, block = (data["contestants"][layout]["median"] for layout in ("region", "block"))
    assert region["max_concurrent"] == block["max_concurrent"] == region["total"] == 12
    assert (block["total"], block["num_preemptions"]) == (12 * 6, 0)


def test_shared_prompts_are_found_and_others_are_not(run_bench: Bench) -> None:
    small = ["--num-requests", "3", "--system-prompt-tokens", "64", "--output-len", "2", "4"]
    data = run_bench(m4_measured.main, *TINY, "prefix", *small).data
    shared, nothing = data["comparisons"]
    on, off = (shared["contestants"][name]["median"] for name in ("caching on", "caching off"))
    assert (on["saved_tokens"], off["saved_tokens"]) == (2 * 64, 0)
    assert on["steps"] == off["steps"]
    medians = [own["median"] for own in nothing["contestants"].values()]
    assert [figures["saved_tokens"] for figures in medians] == [0, 0, 0]
    assert len({figures["steps"] for figures in medians}) == 1
    for contest in data["comparisons"]:
        assert set(contest["same_tokens"].values()) == {3}


def test_a_long_arrival_under_three_policies(run_bench: Bench) -> None:
    small = ["--num-requests", "4", "--long-prompt-tokens", "400", "--chunk-tokens", "100"]
    data = run_bench(m4_measured.main, *TINY, "stall", *small).data
    configs = data["engines"].values()
    assert [(c["prefill_policy"], c["max_num_batched_tokens"]) for c in configs] == [
        ("mixed", 100),
        ("prefill_first", 2048),
        ("mixed", 2048),
    ]
    assert set(data["same_tokens"].values()) == {4}
    mixed, first, _ = (own["median"] for own in data["contestants"].values())
    assert mixed["steps"] == 64 < first["steps"], "nobody decodes while prefill goes first"


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (MAINS["m1"], [*SMALL, "--set", "seed"], "FIELD=VALUE, got 'seed'"),
        (MAINS["m1"], [*SMALL, "--set", "max_num_seq=3"], "did you mean 'max_num_seqs'?"),
        (MAINS["m1"], [*SMALL, "--max-model-len", "4"], "max_model_len=4"),
        (MAINS["m1"], [*SMALL, "--baseline", "vllm"], "usage: python -m m1_single.bench"),
        (MAINS["m1"], [*SMALL, "--input-len", "9", "3"], "usage: python -m m1_single.bench"),
        (MAINS["m1"], [*SMALL, "--markdown", "/dev/null/bench.md"], "usage: python -m m1_single.b"),
        (m3_layouts.main, [*LAYOUTS, "--kv-cache-tokens", "100"], "hold no request of max_model_l"),
        (m3_layouts.main, [*LAYOUTS, "--input-len", "16", "200"], "but max_model_len=128"),
        (m3_layouts.main, [*LAYOUTS, "--max-model-len", "4096"], "has positions for only 1024 tok"),
        (m4_measured.main, [*TINY, "stall", "--num-requests", "1"], "needs at least 2 requests"),
    ],
)
def test_bad_options_end_before_the_work_and_leave_files_as_they_are(
    main: Any, arguments: list[str], message: str, capsys: Any, tmp_path: Path
) -> None:
    kept = tmp_path / "kept.json"
    kept.write_text("{}")
    try:
        status = main([*arguments, "--json", str(kept)])
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message in " ".join(err.split())
    assert kept.read_text() == "{}"
