"""The demo, run end to end on a tiny model."""

from __future__ import annotations

import bdb
import subprocess
import sys
from pathlib import Path

import pytest

from m1_single import LLMEngine
from m1_single.demo import main
from milestone_llm import MILESTONES
from milestone_llm.trace.jsonl import read_run

TINY = ["--model", "tiny-llama"]


def test_demo_shows_steps_text_summary_and_picture(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*TINY, "--out", str(tmp_path / "plots")]) == 0
    captured = capsys.readouterr()
    path = tmp_path / "plots" / "m1_timeline.png"
    assert captured.out.rstrip().endswith(f"timeline: {path}")
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    for text in ("step 0 ", "step 10 ", "step 99 ", "padding", "26 tokens in, 100 out", "TTFT"):
        assert text in captured.out
    lines = captured.out.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith("timeline"))
    assert len(lines) < 130, "telling steps, not all hundred"
    assert not captured.err.strip(), "no noise"


@pytest.mark.usefixtures("no_pixels")
def test_own_prompts_and_lengths(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    arguments = ["--prompts", "two words", "[bold]one[/]", "--max-tokens", "3", "--trace"]
    assert main([*TINY, "--out", str(tmp_path), *arguments, str(trace)]) == 0
    assert len(read_run(trace)) == 3
    out = capsys.readouterr().out
    assert "2 tokens in, 3 out, ended by length" in out
    assert "1 token in, 3 out, ended by length" in out


@pytest.mark.usefixtures("no_pixels")
def test_seed_decides_sampled_tokens(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def sampled(seed: str) -> str:
        arguments = ["--temperature", "1", "--seed", seed, "--max-tokens", "8"]
        assert main([*TINY, "--out", str(tmp_path), *arguments]) == 0
        out = capsys.readouterr().out
        return out[out.index("Answers") : out.index("Requests")]

    assert sampled("1") == sampled("1") != sampled("2")


@pytest.mark.usefixtures("no_pixels")
def test_trace_on_the_console_shows_every_step_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ["--trace", "console", "--max-tokens", "4", "--prompts", "a b", "c"]
    assert main([*TINY, "--out", str(tmp_path), *arguments]) == 0
    out = capsys.readouterr().out
    assert [out.count(f"step {step}  m1_single") for step in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "tiny-nothing"], "tiny-llama"),
        (["--temperature", "-1"], "temperature must be a number from 0"),
        (["--trace", "trace.txt"], "trace.txt"),
        (["--max-num-seqs", "1", "--prompts", ""], "prompt is empty"),
    ],
)
def test_bad_values_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*TINY, "--out", str(tmp_path), *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in " ".join(captured.err.split())


@pytest.mark.parametrize("end", [KeyboardInterrupt, bdb.BdbQuit], ids=["Ctrl-C", "quit in pdb"])
def test_the_user_s_end_is_a_clean_end(
    end: type[BaseException],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engines = []

    def step(self: LLMEngine) -> list[object]:
        engines.append(self)
        raise end

    monkeypatch.setattr(LLMEngine, "step", step)
    assert main([*TINY, "--out", str(tmp_path)]) == 130
    assert "Stopped" in capsys.readouterr().err
    assert not engines[0].has_unfinished_requests()


@pytest.mark.parametrize("option", ["--out", "--trace"])
def test_output_paths_are_tried_before_the_work(
    option: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLMEngine, "step", lambda self: pytest.fail("there was work"))
    (tmp_path / "file").touch()
    assert main([*TINY, "--out", str(tmp_path), option, str(tmp_path / "file" / "t.jsonl")]) == 2
    assert "file" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "trying leaves nothing behind"


@pytest.mark.parametrize("door", ["demo", "bench"])
def test_the_first_screen_needs_no_torch(door: str) -> None:
    """`--help` and wrong options of all milestones answer at once."""
    modules = [f"{name}.{door}" for name in MILESTONES] + ["m4_prefix_chunked.tools.stress"]
    program = f"""
import importlib, sys
sys.modules.update(torch=None, transformers=None)
for name in {modules}:
    try:
        importlib.import_module(name).main(["--help"])
    except SystemExit as ended:
        assert ended.code == 0, name
"""
    subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
