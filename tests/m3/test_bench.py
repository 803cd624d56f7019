"""The bench of KV layouts on a tiny model: what it prints and writes, and its figures."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from docs.questions.m3_layouts import main
from m3_paged.bench import main as common_bench

pytest_plugins = ["bench_helpers"]
TINY = ["--model", "tiny-llama", "--num-requests", "12", "--max-model-len", "128"]
TINY += ["--input-len", "16", "40", "--output-len", "16", "30", "--device", "cpu"]


@pytest.fixture
def bench(run_bench: Any) -> Any:
    """The bench on a tiny model."""
    return lambda *arguments: run_bench(main, *TINY, *arguments)


def test_blocks_serve_more_requests_from_the_same_memory(bench: Any) -> None:
    out, _, data, _ = bench()
    region, block = (data["contestants"][layout]["median"] for layout in ("region", "block"))
    assert (region["max_concurrent"], region["total"], region["peak_used"]) == (4, 4, 4)
    assert (block["max_concurrent"], block["total"]) == (12, 4 * 128 // 16)
    assert region["num_tokens"] == block["num_tokens"]
    assert region["waste_share"] > 0.5
    assert block["waste_per_request"] <= 16 / 2 + 1
    out = " ".join(out.split())
    assert "token for token the same as region: 12 of 12 outputs" in out
    assert "m2_batching, 4 regions of max_model_len=128: 512 tokens of KV" in out
    for word in (
        "seed 0",
        "cpu, 1 CPU thread;",
        f"torch {torch.__version__}",
        "tiny-llama, float32",
    ):
        assert word in out


def test_regions_of_the_longest_request_are_measured_too(bench: Any) -> None:
    data = bench("--rounds", "1").data
    block, region, short = data["contestants"]
    assert (block, region) == ("block", "region")
    length = data["engines"][short]["max_model_len"]
    assert short == f"region, {length}"
    assert length <= 40 + 30
    assert data["contestants"][short]["median"]["max_concurrent"] == 4 * 128 // length


def test_markdown_has_the_tables(bench: Any) -> None:
    run = bench("--rounds", "2")
    block = run.data["contestants"]["block"]["median"]
    rows = [line for line in run.markdown.splitlines() if line.startswith("| block |")]
    speeds, memory, times = (row.split(" | ") for row in rows)
    assert speeds[1:3] == [
        f"{block['tok_s']:,.1f}",
        f"{block['tok_s_min']:,.1f}..{block['tok_s_max']:,.1f}",
    ]
    assert f"{block['peak_used']:.0f} of 32" in memory
    assert len(times) == 10
    assert "- machine: cpu, 1 CPU thread;" in run.markdown


def test_rounds_are_three_by_default_and_layouts_alternate(bench: Any) -> None:
    lines = bench("--num-requests", "2", "--output-len", "16", "16").err.splitlines()
    order = [re.match(r"round (\d)/3  (.+?) {2,}", line).groups() for line in lines]
    names = [name for _, name in order[:3]]
    assert names[:2] == ["block", "region"]
    turns = [("1", names), ("2", names[::-1]), ("3", names)]
    assert order == [(number, name) for number, turn in turns for name in turn]


def test_too_little_memory_for_all(bench: Any) -> None:
    data = bench("--rounds", "1", "--kv-cache-tokens", "200").data
    figures = data["contestants"]["block"]["median"]
    assert figures["num_preemptions"] > 0
    assert figures["peak_used"] == 12


def test_equal_concurrency_gives_both_memory_for_all(bench: Any) -> None:
    data = bench("--equal-concurrency", "--rounds", "1", "--block-size", "24").data
    region, block = (data["contestants"][layout]["median"] for layout in ("region", "block"))
    assert region["max_concurrent"] == block["max_concurrent"] == 12
    assert region["total"] == 12
    assert block["total"] == 12 * 6
    assert block["num_preemptions"] == 0


def test_the_bench_of_all_milestones_is_there_too(run_bench: Any) -> None:
    data = run_bench(common_bench, *TINY, "--baseline", "static").data
    assert data["same_tokens"] == {"HF static batch": 12}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-tokens", "100"], "100 tokens of KV memory hold no request of max_model_len"),
        (["--input-len", "16", "200"], "but max_model_len=128"),
        (["--baseline", "hf"], "--baseline goes with the benches"),
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
