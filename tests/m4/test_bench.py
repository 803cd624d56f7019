"""The scenarios of the bench and its M3 baseline on a tiny model; no measured time is judged."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m4_prefix_chunked.bench import main
from m4_prefix_chunked.tools.bench_report import verdicts
from m4_prefix_chunked.tools.gaps import GapFigures

TINY = ["--model", "tiny-llama", "--rounds", "1"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the bench; returns what it printed, its data and, of a scenario, its Markdown."""

    def run(*arguments: str) -> tuple[str, dict[str, Any], str]:
        data, table = tmp_path / "deep" / "bench.json", tmp_path / "deep" / "bench.md"
        options = [*TINY, *arguments, "--json", str(data)]
        if "--scenario" in arguments:
            options += ["--markdown", str(table)]
        assert main(options) == 0
        out = capsys.readouterr().out
        assert all(len(line) <= 80 for line in out.splitlines() if "written" not in line)
        text = table.read_text() if table.exists() else ""
        return out, json.loads(data.read_text()), text

    return run


def test_shared_prompts_are_found_and_others_are_not(bench: Any) -> None:
    small = ["--num-requests", "3", "--system-prompt-tokens", "64", "--output-len", "2", "4"]
    out, data, table = bench("--scenario", "prefix", *small)
    shared, nothing = data["contests"]
    (on,), (off,) = (shared["rounds"][name] for name in ("caching on", "caching off"))
    assert (on["saved_tokens"], off["saved_tokens"]) == (2 * 64, 0)
    assert on["steps"] == off["steps"]
    assert all(nothing["rounds"][name][0]["saved_tokens"] == 0 for name in nothing["engines"])
    for contest in data["contests"]:
        assert set(contest["same_tokens"].values()) == {3}
        switches = [config.get("enable_prefix_caching") for config in contest["engines"].values()]
        assert switches[:2] == [True, False]
    assert list(nothing["engines"]) == ["caching on", "caching off", "m3_paged"]
    assert len({rounds[0]["steps"] for rounds in nothing["rounds"].values()}) == 1
    assert [target["at_most"] for target in shared["targets"]] == [0.25, None, None]
    assert nothing["targets"][0]["at_most"] == 1.02
    for word in ("seed 0", f"torch {torch.__version__}", "tiny-llama, float32", "target at most"):
        assert word in " ".join(out.split())
    assert table.count("| caching on |") == 2


def test_a_long_arrival_under_three_policies(bench: Any) -> None:
    small = ["--num-requests", "4", "--long-prompt-tokens", "400", "--chunk-tokens", "100"]
    out, data, table = bench("--scenario", "stall", *small)
    (contest,) = data["contests"]
    configs = contest["engines"]
    assert [(c["prefill_policy"], c["max_num_batched_tokens"]) for c in configs.values()] == [
        ("mixed", 100),
        ("prefill_first", 2048),
        ("mixed", 2048),
    ]
    assert set(contest["same_tokens"].values()) == {4}
    mixed, first, _ = (rounds[0] for rounds in contest["rounds"].values())
    assert mixed["steps"] == 64 < first["steps"], "nobody decodes while prefill goes first"
    assert "p99 gap of the running requests, mixed, 100 against prefill_first" in " ".join(
        out.split()
    )
    assert "| prefill_first |" in table


def test_the_common_bench_against_m3(bench: Any) -> None:
    lengths = ["--input-len", "3", "12", "--output-len", "2", "7"]
    out, data, _ = bench("--num-requests", "4", *lengths, "--baseline", "m3")
    assert list(data["contestants"]) == ["m4_prefix_chunked", "m3_paged"]
    assert data["same_tokens"] == {"m3_paged": 4}
    assert "4 of 4 outputs are token for token those of m3_paged" in out


def test_a_missed_target_and_a_loss_are_told() -> None:
    target = {"meaning": "time", "figure": "seconds", "ours": "on", "theirs": "off"}
    loss = {**target, "at_most": 1.0, "ratio": 1.5, "rounds": [1.4, 1.6], "loses": "it waits"}
    gain = {**target, "at_most": 1.0, "ratio": 0.5, "rounds": [0.5], "loses": "it waits"}
    told = {**target, "at_most": None, "ratio": 1.01, "rounds": [1.01], "loses": "it waits"}
    for each in (loss, gain, told):
        each["is_met"] = None if each["at_most"] is None else each["ratio"] <= each["at_most"]
    data = {"targets": [loss, gain, told], "same_tokens": {"on": 3, "off": 2}}
    assert verdicts({**data, "workload": {"num_requests": 3}}) == [
        "time, on against off: 1.500x (1.400..1.600); target at most 1x: MISSED",
        "on loses there: it waits",
        "time, on against off: 0.500x; target at most 1x: met",
        "time, on against off: 1.010x",
        "2 of 3 outputs are token for token the same with on and off",
    ]


def test_gaps_are_taken_of_all_requests_together() -> None:
    gaps = GapFigures.of_times([[0.0, 1.0, 2.0], [5.0], [0.0, 4.0], []])
    assert (gaps.num_gaps, gaps.p50, gaps.longest) == (3, 1.0, 4.0)
    assert 1.0 < gaps.p99 <= 4.0
    assert GapFigures.of_times([[1.0]]) == GapFigures(0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--markdown", "x.md"], "--markdown goes with --scenario"),
        (["--scenario", "stall", "--num-requests", "1"], "needs at least 2 requests"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main([*TINY, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())
