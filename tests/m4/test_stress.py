"""The stress run, end to end on a tiny model, and the faults that it must not overlook."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from m3_paged.block_manager import BlockManager
from m4_prefix_chunked.caching_pool import CachingBlockPool
from m4_prefix_chunked.tools.stress import main, trend
from milestone_llm.frontend.outputs import CompletionOutput

pytest_plugins = ["helpers.benches"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

SMALL = ["--concurrency", "10", "--requests", "40", "--max-model-len", "112", "--rate", "3"]
Stress = Callable[..., tuple[int, dict[str, str]]]


@pytest.fixture
def stress(capsys: pytest.CaptureFixture[str], tmp_path: Path, no_pixels: None) -> Stress:
    """Runs with options; returns the exit status, and the lines of the report by their names."""

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        status = main([*SMALL, "--out", str(tmp_path), *arguments])
        report, picture = capsys.readouterr().out.split("\npicture: ")
        assert picture.strip() == str(tmp_path / "stress.png")
        rows = re.findall(r"^(\S.{11})  (.*(?:\n {14}.*)*)", report, re.MULTILINE)
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


def test_a_lost_block_a_broken_invariant_and_a_short_output_are_told(
    stress: Stress, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        free = forgetful(CachingBlockPool.free, 100, lambda pool, block: None)
        patch.setattr(CachingBlockPool, "free", free)
        status, report = stress("--no-invariants")
        assert (status, report["blocks lost"]) == (1, "1")
    with monkeypatch.context() as patch:
        free = forgetful(BlockManager.free, 5, lambda manager, name: manager.block_tables.pop(name))
        patch.setattr(BlockManager, "free", free)
        status, report = stress()
        assert status == 1
        assert re.search(r"step \d+: ", report["BROKEN"])
    monkeypatch.setattr(CompletionOutput, "token_ids", [])
    status, report = stress()
    assert status == 1
    assert re.search(r"step \d+: r\d+: 0 tokens of \d+, ended by length", report["BROKEN"])


def test_memory_trend_tells_growth_from_jitter() -> None:
    flat = trend([1000, *[100, 102] * 50])
    assert re.fullmatch(r"102 MB; growth after warm-up [+-]0.0 MB, jitter 1.0 MB", flat)
    assert trend(range(100)) == "99 MB; growth after warm-up +79.0 MB, jitter 0.0 MB"
