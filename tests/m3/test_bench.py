"""The bench of KV layouts on a tiny model: what it prints and writes, and its figures."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from m3_paged.bench import main
from m3_paged.tools.layout_report import medians, round_figures
from milestone_llm.bench.measure import RunResult

TINY = ["--model", "tiny-llama", "--num-prompts", "12", "--max-model-len", "128"]
TINY += ["--max-input-len", "40", "--max-output-len", "30", "--device", "cpu"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the bench; returns what it printed, the data and the Markdown it wrote."""

    def run(*arguments: str) -> tuple[str, dict[str, Any], list[str]]:
        data, table = tmp_path / "deep" / "bench.json", tmp_path / "deep" / "bench.md"
        assert main([*TINY, *arguments, "--json", str(data), "--markdown", str(table)]) == 0
        out = capsys.readouterr().out
        assert out.endswith(f"written: {data}\nwritten: {table}\n")
        assert max(map(len, out.splitlines()[:-2])) <= 80
        return out, json.loads(data.read_text()), table.read_text().splitlines()

    return run


def test_blocks_serve_more_requests_from_the_same_memory(bench: Any) -> None:
    out, data, _ = bench()
    slot, block = (medians(data["rounds"][layout]) for layout in ("slot", "block"))
    assert (slot["max_concurrent"], slot["total"], slot["peak_used"]) == (4, 4, 4)
    assert (block["max_concurrent"], block["total"]) == (12, 4 * 128 // 16)
    assert "blocks serve 3.00x the requests at a time" in out
    assert slot["completion_tokens"] == block["completion_tokens"]
    assert slot["waste_share"] > 0.5
    assert block["waste_per_request"] <= 16 / 2 + 1
    assert "12 of 12 outputs are token for token the same in both layouts" in out
    assert "m2_batching, 4 slots of max_model_len=128: 512 tokens of KV" in out
    for word in ("seed 0", "cpu, 1 threads", f"torch {torch.__version__}", "tiny-llama, float32"):
        assert word in out


def test_markdown_has_a_row_for_each_round_and_layout(bench: Any) -> None:
    _, data, table = bench("--rounds", "2")
    rows = [line.strip("| ").split(" | ") for line in table if line.startswith("| ")]
    head, *rows = rows
    assert [row[:2] for row in rows] == [
        ["1", "slot"],
        ["1", "block"],
        ["2", "slot"],
        ["2", "block"],
    ]
    assert all(len(row) == len(head) for row in rows)
    figures = data["rounds"]["block"][1]
    own = dict(zip(head, rows[3], strict=True))
    assert own["tok/s"] == f"{figures['tok_s']:.1f}"
    assert own["TTFT p95, ms"] == f"{figures['ttft_p95']:.1f}"
    assert own["watermark"] == f"{figures['peak_used']} of 32"
    assert any(line.startswith("- machine: cpu, 1 threads") for line in table)


def test_rounds_are_three_by_default_and_layouts_alternate(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*TINY, "--num-prompts", "2", "--max-output-len", "16"]) == 0
    order = [line.split()[:3] for line in capsys.readouterr().err.splitlines()]
    assert [(number, layout) for _, number, layout in order] == [
        ("1/3", "slot"),
        ("1/3", "block"),
        ("2/3", "block"),
        ("2/3", "slot"),
        ("3/3", "slot"),
        ("3/3", "block"),
    ]


def test_one_layout_alone_and_too_little_memory_for_all(bench: Any) -> None:
    out, data, _ = bench("--layout", "block", "--rounds", "1", "--kv-cache-tokens", "200")
    assert list(data["rounds"]) == ["block"]
    assert "slots" not in out
    assert data["rounds"]["block"][0]["num_preemptions"] > 0
    assert data["rounds"]["block"][0]["peak_used"] == 12


def test_equal_concurrency_gives_both_memory_for_all(bench: Any) -> None:
    _, data, _ = bench("--equal-concurrency", "--rounds", "1", "--block-size", "24")
    slot, block = data["rounds"]["slot"][0], data["rounds"]["block"][0]
    assert slot["max_concurrent"] == block["max_concurrent"] == 12
    assert slot["total"] == 12
    assert block["total"] == 12 * 6
    assert block["num_preemptions"] == 0


def test_figures_of_a_round() -> None:
    result = RunResult(
        seconds=2.0,
        token_ids=[[1, 2, 3], [4]],
        token_times=[[0.5, 1.0, 2.0], [0.25]],
        facts={"max_concurrent": 2},
    )
    figures = round_figures(result)
    assert (figures["completion_tokens"], figures["tok_s"], figures["max_concurrent"]) == (4, 2, 2)
    assert (figures["ttft_mean"], figures["ttft_p50"]) == (375, 375)
    assert (figures["tpot_mean"], figures["latency_mean"]) == (750, 1125)
    assert figures["latency_p95"] == pytest.approx(250 + 0.95 * 1750)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-tokens", "100"], "100 tokens of KV memory hold no request of max_model_len"),
        (["--min-input-len", "50"], "--min-input-len 50 is above --max-input-len 40"),
        (["--max-input-len", "200"], "but max_model_len=128"),
        (["--max-model-len", "4096"], "has positions for only 1024 tokens"),
    ],
)
def test_bad_input_ends_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TINY, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out
