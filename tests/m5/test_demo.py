"""The demo of M5, run end to end on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from m5_kernels.demo import main
from milestone_llm.trace.jsonl import read_run

SHORT = ["--max-tokens", "6"]


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the demo with options; returns what it printed and its trace."""

    def run(*arguments: str, model: str = "tiny-llama") -> tuple[str, list[dict[str, Any]]]:
        trace, picture = tmp_path / "trace.jsonl", tmp_path / "m5_timeline.png"
        options = ["--model", model, "--out", str(tmp_path), "--trace", str(trace)]
        assert main([*options, *arguments]) == 0
        captured = capsys.readouterr()
        assert not captured.err.strip()
        assert captured.out.rstrip().endswith(f"timeline: {picture}")
        assert picture.read_bytes().startswith(b"\x89PNG\r\n")
        lines = captured.out.splitlines()
        assert all(len(line) <= 80 for line in lines if not line.startswith("timeline"))
        return " ".join(captured.out.split()), [record.to_dict() for record in read_run(trace)]

    return run


def test_m4_and_m5_take_the_same_steps_to_the_same_tokens(demo: Any) -> None:
    out, trace = demo()
    assert [len(record["batch"]) for record in trace] == [3] * 10 + [2] * 40 + [1] * 50
    assert "M4 and M5 gave the same tokens" in out
    assert "torch's kernels" in out or "Triton kernels" in out


@pytest.mark.usefixtures("no_pixels")
def test_eager_steps_give_the_same_tokens(demo: Any) -> None:
    out, _ = demo("--enforce-eager", *SHORT)
    assert "M4 and M5 gave the same tokens" in out


@pytest.mark.usefixtures("no_pixels")
def test_a_family_without_fused_decoder_says_so(demo: Any) -> None:
    out, _ = demo(*SHORT, model="tiny-gpt2")
    assert "there is no fused decoder for gpt2" in out
