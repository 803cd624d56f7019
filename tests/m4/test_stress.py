"""The stress run, end to end on a tiny model, and the faults that it must not overlook."""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m3_paged.block_manager import BlockManager
from m4_prefix_chunked.caching_pool import CachingBlockPool
from m4_prefix_chunked.tools.stress import main, trend
from m4_prefix_chunked.tools.stress_traffic import Traffic
from milestone_llm.frontend.outputs import CompletionOutput

pytest_plugins = ["bench_helpers"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SMALL = ["--concurrency", "10", "--requests", "40", "--max-model-len", "112", "--rate", "3"]
Stress = Callable[..., tuple[int, dict[str, str]]]


@pytest.fixture
def stress(capsys: pytest.CaptureFixture[str], tmp_path: Path, no_pixels: None) -> Stress:
    """Runs with options; returns the exit status, and the lines of the report by their names."""

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        status = main([*SMALL, "--out", str(tmp_path), *arguments])
        out = capsys.readouterr().out
        report, picture = out.split("\npicture: ")
        assert picture.strip() == str(tmp_path / "stress.png")
        assert all(len(line) <= 80 for line in report.splitlines())
        rows = re.findall(r"^ (\S.{11}) (.*(?:\n {14}.*)*)", report, re.MULTILINE)
        return status, {name.strip(): " ".join(text.split()) for name, text in rows}

    return run


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--arrivals", "burst", "--preemption", "swap"],
        ["--set", "prefill_policy=prefill_first", "long_prefill_token_threshold=16"],
        ["--set", "enable_prefix_caching=false", "enable_chunked_prefill=false"],
        ["--milestone", "m5_kernels"],
    ],
    ids=["default", "burst and swap", "prefill first", "both off", "m5"],
)
def test_every_request_ends_and_every_block_comes_back(stress: Stress, options: list[str]) -> None:
    status, report = stress(*options)
    assert status == 0
    ended = {why: int(count) for count, why in re.findall(r"(\d+) (\w+)", report["ended by"])}
    assert sum(ended.values()) == 40
    assert set(ended) <= {"stop", "length", "abort"}
    assert ended["abort"] > 0
    assert report["blocks lost"] == "0"
    assert int(report["preemptions"].split(";")[0]) > 0, "the pool is to be too small"
    has_hits = not re.search(r"\b0 requests hit", report["prefix cache"])
    assert has_hits == ("enable_prefix_caching=false" not in options)
    assert {"TTFT", "ITL", "step", "KV blocks", "throughput", "memory"} <= set(report)


def test_a_seed_gives_the_same_traffic_again(stress: Stress) -> None:
    def counts(seed: str) -> list[str]:
        _, report = stress("--requests", "12", "--seed", seed)
        return [report[name] for name in ("ended by", "preemptions", "prefix cache")]

    assert counts("3") == counts("3") != counts("4")


def forgetful(method: Callable[..., Any], number: int, forget: Callable[..., Any]) -> Any:
    """A method that does something else at this call."""
    calls: list[Any] = []

    def call(*arguments: Any) -> Any:
        calls.append(arguments)
        return (forget if len(calls) == number else method)(*arguments)

    return call


def test_a_lost_block_is_found_at_the_end(stress: Stress, monkeypatch: pytest.MonkeyPatch) -> None:
    free = forgetful(CachingBlockPool.free, 100, lambda pool, block: None)
    monkeypatch.setattr(CachingBlockPool, "free", free)
    status, report = stress("--no-invariants")
    assert (status, report["blocks lost"]) == (1, "1")


def test_a_broken_invariant_is_told_with_its_step(
    stress: Stress, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = forgetful(BlockManager.free, 5, lambda manager, name: manager.block_tables.pop(name))
    monkeypatch.setattr(BlockManager, "free", free)
    status, report = stress()
    assert status == 1
    assert re.search(r"step \d+: ", report["BROKEN"])


def test_an_output_that_is_too_short_is_told(
    stress: Stress, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CompletionOutput, "token_ids", [])
    status, report = stress()
    assert status == 1
    assert re.search(r"step \d+: r\d+: 0 tokens of \d+, ended by length", report["BROKEN"])


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--set", "max_num_sequences=4"]) == 2
    assert "did you mean 'max_num_seqs'" in " ".join(capsys.readouterr().err.split())


# --- the traffic --------------------------------------------------------------------------------


def traffic(requests: int, **options: Any) -> Traffic:
    defaults = {"max_model_len": 128, "arrivals": "poisson", "rate": 5.0, "concurrency": 100}
    args = Namespace(**{**defaults, "requests": requests, "seed": 0, **options})
    return Traffic(args, vocab_size=99)


@pytest.mark.parametrize("arrivals", ["poisson", "burst"])
def test_requests_come_at_their_rate_one_by_one_or_all_at_once(arrivals: str) -> None:
    requests, sizes = traffic(4000, arrivals=arrivals), []
    while requests.num_left:
        sizes.append(len(requests.due(len(sizes))))
    is_burst = all(size % 100 == 0 for size in sizes)
    assert is_burst == (arrivals == "burst")
    assert 400 < len(sizes) < 1600  # 4,000 / 5, give or take


def test_requests_fit_the_model_and_most_are_short() -> None:
    planned = traffic(2000, max_model_len=512).due(10**6)
    lengths = sorted(len(request.prompt) for request in planned)
    assert lengths[-1] > 4 * lengths[len(lengths) // 2], "a few are very long"
    assert all(0 < len(p.prompt) + p.params.max_tokens <= 512 for p in planned)


def test_memory_trend_tells_growth_from_jitter() -> None:
    flat = trend([1000, *[100, 102] * 50])
    assert re.fullmatch(r"102 MB; growth after warm-up [+-]0.0 MB, jitter 1.0 MB", flat)
    assert trend(range(100)) == "99 MB; growth after warm-up +79.0 MB, jitter 0.0 MB"
