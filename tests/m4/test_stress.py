"""The stress run, end to end on a tiny model, and the faults that it must not overlook."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from m3_paged.block_manager import BlockManager
from m4_prefix_chunked.caching_pool import CachingBlockPool
from m4_prefix_chunked.tools.stress import main, resident_mb, trend
from m4_prefix_chunked.tools.stress_traffic import Traffic
from milestone_llm.frontend.outputs import CompletionOutput

pytestmark = pytest.mark.slow

PNG = b"\x89PNG\r\n"
SMALL = ["--concurrency", "10", "--requests", "40", "--max-model-len", "112", "--rate", "3"]


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def stress(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs with options; returns the exit status, and the lines of the report by their names."""

    def run(*arguments: str) -> tuple[int, dict[str, str]]:
        status = main([*SMALL, "--out", str(tmp_path), *arguments])
        out = capsys.readouterr().out
        assert (tmp_path / "stress.png").read_bytes().startswith(PNG)
        report, picture = out.split("\npicture: ")
        assert picture.strip() == str(tmp_path / "stress.png")
        assert all(len(line) <= 80 for line in report.splitlines())
        rows = re.findall(r"^ (\S.{11}) (.*(?:\n {14}.*)*)", report, re.MULTILINE)
        return status, {name.strip(): " ".join(text.split()) for name, text in rows}

    return run


@pytest.mark.usefixtures("no_pixels")
@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--arrivals", "burst", "--preemption", "swap"],
        ["--set", "prefill_policy=prefill_first", "long_prefill_token_threshold=16"],
        ["--set", "enable_prefix_caching=false", "enable_chunked_prefill=false"],
    ],
    ids=["default", "burst and swap", "prefill first", "both off"],
)
def test_every_request_ends_and_every_block_comes_back(stress: Any, options: list[str]) -> None:
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
    assert "output tokens/s" in report["throughput"]
    assert "growth after warm-up" in report["memory"]
    assert {"TTFT", "ITL", "step", "KV blocks"} <= set(report)


def test_it_runs_over_m5_as_well(stress: Any) -> None:
    status, report = stress("--milestone", "m5_kernels", "--requests", "12")
    assert status == 0
    assert report["blocks lost"] == "0"


@pytest.mark.usefixtures("no_pixels")
def test_a_seed_gives_the_same_traffic_again(stress: Any) -> None:
    def counts(*arguments: str) -> list[str]:
        _, report = stress("--requests", "12", *arguments)
        tokens, steps = re.findall(r"([\d,]+ tokens) in .* s, (\d+ steps)", report["throughput"])[0]
        return [tokens, steps, *(report[n] for n in ("ended by", "preemptions", "prefix cache"))]

    first = counts("--seed", "3")
    assert counts("--seed", "3") == first
    assert counts("--seed", "4") != first


@pytest.mark.usefixtures("no_pixels")
def test_a_lost_block_is_found_at_the_end(stress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free, calls = CachingBlockPool.free, []

    def forgetful(self: CachingBlockPool, block: int) -> None:
        calls.append(block)
        if len(calls) != 100:
            free(self, block)

    monkeypatch.setattr(CachingBlockPool, "free", forgetful)
    status, report = stress("--no-invariants")
    assert status == 1
    assert report["blocks lost"] == "1"


@pytest.mark.usefixtures("no_pixels")
def test_a_broken_invariant_is_told_with_its_step(
    stress: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, calls = BlockManager.free, []

    def forgetful(self: BlockManager, request_id: str) -> None:
        calls.append(request_id)
        if len(calls) == 5:
            self.block_tables[request_id].pop()
        free(self, request_id)

    monkeypatch.setattr(BlockManager, "free", forgetful)
    status, report = stress()
    assert status == 1
    assert re.search(r"step \d+: block \d+", report["BROKEN"])


@pytest.mark.usefixtures("no_pixels")
def test_an_output_that_is_too_short_is_told(stress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompletionOutput, "token_ids", [])
    status, report = stress()
    assert status == 1
    assert re.search(r"step \d+: r\d+: 0 tokens of \d+, ended by length", report["BROKEN"])


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rate", "-1"])
    assert "--rate: -1 is not above 0" in capsys.readouterr().err
    assert main(["--set", "max_num_sequences=4"]) == 2
    assert "did you mean 'max_num_seqs'" in " ".join(capsys.readouterr().err.split())


# --- the traffic --------------------------------------------------------------------------------


def traffic(requests: int, **options: Any) -> Traffic:
    defaults = {"max_model_len": 128, "arrivals": "poisson", "rate": 5.0, "concurrency": 100}
    args = Namespace(**{**defaults, "requests": requests, "seed": 0, **options})
    return Traffic(args, vocab_size=99)


def test_poisson_arrivals_come_at_their_rate() -> None:
    requests, steps = traffic(4000), 0
    while requests.num_left:
        requests.due(steps)
        steps += 1
    assert 720 < steps < 880  # 4,000 / 5, give or take


def test_bursts_come_at_the_same_rate_but_all_at_once() -> None:
    requests, sizes = traffic(3000, arrivals="burst"), []
    while requests.num_left:
        sizes.append(len(requests.due(len(sizes))))
    assert all(size % 100 == 0 for size in sizes)
    assert 300 < len(sizes) < 1200


def test_requests_fit_the_model_and_most_are_short() -> None:
    planned = traffic(2000, max_model_len=512).due(10**6)
    lengths = sorted(len(request.prompt) for request in planned)
    assert lengths[0] >= 1
    assert lengths[-1] > 4 * lengths[len(lengths) // 2], "a few are very long"
    assert all(len(p.prompt) + p.params.max_tokens <= 512 for p in planned)
    beginnings = {tuple(request.prompt[:20]) for request in planned if len(request.prompt) >= 20}
    assert len(beginnings) < 0.8 * sum(len(request.prompt) >= 20 for request in planned)


def test_memory_trend_tells_growth_from_jitter() -> None:
    flat = trend([1000, *[100, 102] * 50])
    assert re.fullmatch(r"102 MB; growth after warm-up [+-]0.0 MB, jitter 1.0 MB", flat)
    assert trend(range(100)) == "99 MB; growth after warm-up +79.0 MB, jitter 0.0 MB"
    assert trend([7.0]) == "7 MB; growth after warm-up +0.0 MB, jitter 0.0 MB"
    assert resident_mb() > 2
