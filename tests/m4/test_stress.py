"""The stress run, end to end on a tiny model, and the faults that it must not overlook."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from m3_paged.block_manager import BlockManager
from m4_prefix_chunked.caching_pool import CachingBlockPool
from m4_prefix_chunked.tools.stress import main
from m4_prefix_chunked.tools.stress_report import MemoryTrend, resident_bytes
from m4_prefix_chunked.tools.stress_traffic import Traffic

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
    """Runs with options; returns the exit status, what was printed and the report as data."""

    def run(*arguments: str) -> tuple[int, str, dict[str, Any]]:
        path = tmp_path / "stress.json"
        path.unlink(missing_ok=True)
        status = main([*SMALL, "--out", str(tmp_path), "--json", str(path), *arguments])
        out = capsys.readouterr().out
        assert (tmp_path / "stress.png").read_bytes().startswith(PNG)
        lines = [line for line in out.splitlines() if not re.match("picture|written", line)]
        assert all(len(line) <= 80 for line in lines)
        return status, out, json.loads(path.read_text())

    return run


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
    status, out, data = stress(*options)
    assert status == 0
    assert sum(data["requests"].values()) == 40
    assert set(data["requests"]) <= {"stop", "length", "abort"}
    assert data["blocks_lost"] == 0
    assert data["preemptions"] > 0, "the pool is to be too small"
    assert data["requests"]["abort"] > 0
    assert (data["prefix_cache"]["hits"] > 0) == ("enable_prefix_caching=false" not in options)
    for name in ("throughput", "TTFT", "ITL", "preemptions", "growth after warm-up", "blocks lost"):
        assert name in out


def test_a_seed_gives_the_same_traffic_again(stress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = "m4_prefix_chunked.tools.stress_plot.draw_stress"  # takes longer than the run
    monkeypatch.setattr(draw, lambda report, path: path.write_bytes(PNG))

    def counts(*arguments: str) -> dict[str, Any]:
        _, _, data = stress("--requests", "12", *arguments)
        names = ("requests", "output_tokens", "steps", "preemptions", "prefix_cache")
        return {name: data[name] for name in names}

    first = counts("--seed", "3")
    assert counts("--seed", "3") == first
    assert counts("--seed", "4") != first


def test_a_lost_block_is_found_at_the_end(stress: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    free, calls = CachingBlockPool.free, []

    def forgetful(self: CachingBlockPool, block: int) -> None:
        calls.append(block)
        if len(calls) != 100:
            free(self, block)

    monkeypatch.setattr(CachingBlockPool, "free", forgetful)
    status, out, data = stress("--no-invariants")
    assert status == 1
    assert data["blocks_lost"] == 1
    assert re.search(r"blocks lost +1", out)


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
    status, out, data = stress()
    assert status == 1
    assert re.search(r"step \d+: block \d+", data["broken"])
    assert "BROKEN" in out
    assert "UNFINISHED" in out


def test_bad_options_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--rate", "-1"]) == 2
    assert "--rate must be above 0 requests a step, got -1" in capsys.readouterr().err
    assert main(["--set", "max_num_sequences=4"]) == 2
    assert "did you mean 'max_num_seqs'" in " ".join(capsys.readouterr().err.split())


# --- the traffic --------------------------------------------------------------------------------


def test_poisson_arrivals_come_at_their_rate() -> None:
    traffic = Traffic(4000, vocab_size=99, max_model_len=128, rate=5.0)
    steps = 0
    while not traffic.is_over:
        traffic.due(steps)
        steps += 1
    assert 720 < steps < 880  # 4,000 / 5, give or take


def test_bursts_come_at_the_same_rate_but_all_at_once() -> None:
    traffic = Traffic(
        3000, vocab_size=99, max_model_len=128, arrivals="burst", rate=5.0, burst_size=100
    )
    sizes = []
    while not traffic.is_over:
        sizes.append(len(traffic.due(len(sizes))))
    assert all(size % 100 == 0 for size in sizes)
    assert 300 < len(sizes) < 1200


def test_requests_fit_the_model_and_most_are_short() -> None:
    traffic = Traffic(2000, vocab_size=99, max_model_len=512)
    planned = traffic.due(10**6)
    lengths = sorted(len(request.prompt) for request in planned)
    assert lengths[0] >= 1
    assert lengths[-1] > 5 * lengths[len(lengths) // 2], "a few are very long"
    assert all(len(p.prompt) + p.params.max_tokens <= 512 for p in planned)
    beginnings = {tuple(request.prompt[:20]) for request in planned if len(request.prompt) >= 20}
    assert len(beginnings) < 0.8 * sum(len(request.prompt) >= 20 for request in planned)


def test_memory_trend_tells_growth_from_jitter() -> None:
    flat = MemoryTrend.of([1000, *[100, 102] * 50])
    assert abs(flat.growth) < 0.5
    assert flat.jitter == pytest.approx(1, abs=0.05)
    rising = MemoryTrend.of(list(range(100)))
    assert rising.growth == pytest.approx(79)
    assert rising.jitter == pytest.approx(0)
    assert MemoryTrend.of([]).growth == 0
    assert resident_bytes() > 2**20
