"""The benches of M2 to M4 on a tiny model, and what chapters measured with them.

No measured time is judged.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bench_helpers import BenchRun

import m2_batching
import m3_paged
import m4_prefix_chunked
from docs.questions import m3_layouts, m4_measured
from m2_batching.bench import main as m2_bench
from m3_paged.bench import main as m3_bench
from m4_prefix_chunked.bench import main as m4_bench
from milestone_llm.frontend.outputs import RequestMetrics, RequestOutput
from milestone_llm.lab.bench.hf_baselines import hf_continuous
from milestone_llm.lab.bench.measure import check_work, gap_figures
from milestone_llm.lab.bench.workloads import mixed
from milestone_llm.models.tiny_models import build_tiny_model

pytest_plugins = ["bench_helpers"]

SMALL = ["--num-requests", "4", "--input-len", "3", "12", "--output-len", "2", "7"]
Bench = Callable[..., BenchRun]


@pytest.mark.parametrize(
    ("main", "package", "baseline", "name"),
    [
        (m2_bench, m2_batching, "continuous", "HF continuous"),
        (m3_bench, m3_paged, "static", "HF static batch"),
        (m4_bench, m4_prefix_chunked, "m3", "m3_paged"),
    ],
    ids=["m2", "m3", "m4"],
)
def test_the_baseline_does_the_same_work(
    run_bench: Bench, main: Any, package: Any, baseline: str, name: str
) -> None:
    out, _, data, _ = run_bench(main, "--model", "tiny-qwen3", *SMALL, "--baseline", baseline)
    assert list(data["contestants"]) == [package.__name__, name]
    assert data["same_tokens"] == {name: 4}
    assert data["contestants"][package.__name__]["median"]["useful_share"] == 1
    assert f"token for token the same as {name}: 4 of 4 outputs" in " ".join(out.split())
    assert "were padding" not in out


def test_hf_continuous_batching_does_each_requests_own_work() -> None:
    model = build_tiny_model("llama")
    model.generation_config.eos_token_id = list(range(100))  # half of all tokens end, if asked
    items = mixed(199, 0, num_requests=5, input_len=(2, 9), output_len=(1, 8))
    # Fewer rows than requests.
    engine = m2_batching.LLMEngine(model, max_num_seqs=3, max_model_len=32)
    counts: list[int] = []
    result = hf_continuous(engine, items, counts.append)
    check_work("HF", items, result)
    lengths = [item.params.max_tokens for item in items]
    assert sum(counts) == sum(lengths)
    assert list(map(len, result.token_times)) == lengths
    assert all(times == sorted(times) and times[0] > 0 for times in result.token_times)
    assert model.config._attn_implementation == "sdpa"


# --- M3: regions against blocks -----------------------------------------------------------------

LAYOUTS = ["--model", "tiny-llama", "--num-requests", "12", "--max-model-len", "128"]
LAYOUTS += ["--input-len", "16", "40", "--output-len", "16", "30", "--device", "cpu"]


def test_blocks_serve_more_requests_from_the_same_memory(run_bench: Bench) -> None:
    out, err, data, markdown = run_bench(m3_layouts.main, *LAYOUTS)
    block, region, short = (own["median"] for own in data["contestants"].values())
    assert (region["max_concurrent"], region["total"], region["peak_used"]) == (4, 4, 4)
    assert (block["max_concurrent"], block["total"]) == (12, 4 * 128 // 16)
    assert region["num_tokens"] == block["num_tokens"]
    assert region["waste_share"] > 0.5
    assert block["waste_per_request"] <= 16 / 2 + 1
    length = data["engines"][list(data["contestants"])[2]]["max_model_len"]
    assert length <= 40 + 30, "regions of the longest request are measured, too"
    assert short["max_concurrent"] == 4 * 128 // length
    out = " ".join(out.split())
    assert "token for token the same as region: 12 of 12 outputs" in out
    assert f"torch {torch.__version__}" in out
    assert sum(line.startswith("| block |") for line in markdown.splitlines()) == 3
    assert [line.split()[1] for line in err.splitlines() if line.startswith("round")] == (
        ["1/3"] * 3 + ["2/3"] * 3 + ["3/3"] * 3
    )


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


# --- M4: shared prompts, a long arrival ---------------------------------------------------------

TINY = ["--model", "tiny-llama", "--rounds", "1"]


def test_shared_prompts_are_found_and_others_are_not(run_bench: Bench) -> None:
    small = ["--num-requests", "3", "--system-prompt-tokens", "64", "--output-len", "2", "4"]
    data = run_bench(m4_measured.main, *TINY, "prefix", *small).data
    shared, nothing = data["comparisons"]
    on, off = (shared["contestants"][name]["median"] for name in ("caching on", "caching off"))
    assert (on["saved_tokens"], off["saved_tokens"]) == (2 * 64, 0)
    assert on["steps"] == off["steps"]
    assert list(nothing["engines"]) == ["caching on", "caching off", "m3_paged"]
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


def test_gaps_are_taken_of_all_requests_together() -> None:
    def outputs(*token_times: list[float]) -> list[RequestOutput]:
        return [
            RequestOutput("r", [1], [], RequestMetrics(0.0, None, each)) for each in token_times
        ]

    gaps = gap_figures(outputs([0.0, 1.0, 2.0], [5.0], [0.0, 4.0], []))
    assert (gaps["gap_p50"], gaps["gap_max"]) == (1000.0, 4000.0)
    assert 1000.0 < gaps["gap_p99"] <= 4000.0
    assert gap_figures(outputs([1.0])) == {"gap_p50": 0.0, "gap_p99": 0.0, "gap_max": 0.0}


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (m3_layouts.main, ["--kv-cache-tokens", "100"], "hold no request of max_model_len"),
        (m3_layouts.main, ["--input-len", "16", "200"], "but max_model_len=128"),
        (m3_layouts.main, ["--max-model-len", "4096"], "has positions for only 1024 tokens"),
        (m4_measured.main, ["stall", "--num-requests", "1"], "needs at least 2 requests"),
    ],
)
def test_options_that_do_not_fit_end_with_a_message(
    capsys: pytest.CaptureFixture[str], main: Any, arguments: list[str], message: str
) -> None:
    options = LAYOUTS if main is m3_layouts.main else TINY
    assert main([*options, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.split())
    assert not captured.out
