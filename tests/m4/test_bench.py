"""The scenarios of the bench and its M3 baseline on a tiny model; no measured time is judged."""

from __future__ import annotations

from typing import Any

import pytest

from docs.questions.m4_measured import main
from m4_prefix_chunked.bench import main as common_bench
from milestone_llm.frontend.outputs import RequestMetrics, RequestOutput
from milestone_llm.lab.bench.measure import gap_figures

pytest_plugins = ["bench_helpers"]
TINY = ["--model", "tiny-llama", "--rounds", "1"]


@pytest.fixture
def bench(run_bench: Any) -> Any:
    """The bench on a tiny model."""
    return lambda *arguments: run_bench(main, *TINY, *arguments)


def test_shared_prompts_are_found_and_others_are_not(bench: Any) -> None:
    small = ["--num-requests", "3", "--system-prompt-tokens", "64", "--output-len", "2", "4"]
    _, _, data, table = bench("prefix", *small)
    shared, nothing = data["comparisons"]
    on, off = (shared["contestants"][name]["median"] for name in ("caching on", "caching off"))
    assert (on["saved_tokens"], off["saved_tokens"]) == (2 * 64, 0)
    assert on["steps"] == off["steps"]
    medians = [own["median"] for own in nothing["contestants"].values()]
    assert [figures["saved_tokens"] for figures in medians] == [0, 0, 0]
    for contest in data["comparisons"]:
        assert set(contest["same_tokens"].values()) == {3}
        switches = [config.get("enable_prefix_caching") for config in contest["engines"].values()]
        assert switches[:2] == [True, False]
    assert list(nothing["engines"]) == ["caching on", "caching off", "m3_paged"]
    assert len({figures["steps"] for figures in medians}) == 1
    assert table.count("| caching on |") == 2


def test_a_long_arrival_under_three_policies(bench: Any) -> None:
    small = ["--num-requests", "4", "--long-prompt-tokens", "400", "--chunk-tokens", "100"]
    _, _, data, table = bench("stall", *small)
    configs = data["engines"]
    assert [(c["prefill_policy"], c["max_num_batched_tokens"]) for c in configs.values()] == [
        ("mixed", 100),
        ("prefill_first", 2048),
        ("mixed", 2048),
    ]
    assert set(data["same_tokens"].values()) == {4}
    mixed, first, _ = (own["median"] for own in data["contestants"].values())
    assert mixed["steps"] == 64 < first["steps"], "nobody decodes while prefill goes first"
    assert "| prefill_first |" in table


def test_the_common_bench_against_m3(run_bench: Any) -> None:
    small = ["--num-requests", "4", "--input-len", "3", "12", "--output-len", "2", "7"]
    out, _, data, _ = run_bench(common_bench, *TINY, *small, "--baseline", "m3")
    assert list(data["contestants"]) == ["m4_prefix_chunked", "m3_paged"]
    assert data["same_tokens"] == {"m3_paged": 4}
    assert "token for token the same as m3_paged: 4 of 4 outputs" in out


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
    ("arguments", "message"),
    [
        (["prefix", "--baseline", "hf"], "--baseline goes with the benches"),
        (["stall", "--num-requests", "1"], "needs at least 2 requests"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*TINY, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
