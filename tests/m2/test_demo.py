"""The demo of continuous batching, run end to end on a tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from m2_batching.demo import main
from milestone_llm.trace.jsonl import read_run

PNG = b"\x89PNG\r\n"
SHORT = ["--max-tokens", "6"]
THREE_ROWS = ["--max-num-seqs", "3"]


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the demo with options; returns what it printed and its trace."""

    def run(*arguments: str) -> tuple[str, list[dict[str, Any]]]:
        trace, picture = tmp_path / "trace.jsonl", tmp_path / "m2_timeline.png"
        options = ["--model", "tiny-llama", "--out", str(tmp_path), "--trace", str(trace)]
        assert main([*options, *arguments]) == 0
        captured = capsys.readouterr()
        assert not captured.err.strip()
        assert captured.out.rstrip().endswith(f"timeline: {picture}")
        assert picture.read_bytes().startswith(PNG)
        lines = captured.out.splitlines()
        assert all(len(line) <= 80 for line in lines if not line.startswith("timeline"))
        return captured.out, [record.to_dict() for record in read_run(trace)]

    return run


def test_a_request_waits_for_a_row_and_joins_mid_flight(demo: Any) -> None:
    out, trace = demo()
    assert [len(record["batch"]) for record in trace] == [2] * 60 + [1] * 40
    assert [record["step"] for record in trace if record["waiting"] == ["r2"]] == [*range(10)]
    assert trace[10]["admitted"] == ["r2"]
    assert {row["phase"] for row in trace[10]["batch"]} == {"decode", "prefill"}
    assert "waits     r2: no row is left: max_num_seqs=2" in out
    steps = next(line.split() for line in out.splitlines() if line.split()[:1] == ["steps"])
    assert steps == ["steps", "150", "100"], "in the static batch r2 waits for r1, too"


@pytest.mark.usefixtures("no_pixels")
def test_batch_falls_from_three_to_two_to_one(demo: Any) -> None:
    out, trace = demo("--max-num-seqs", "8")
    sizes = [len(record["batch"]) for record in trace]
    assert sizes == [3] * 10 + [2] * 40 + [1] * 50
    assert "static" in out
    assert "continuous" in out
    assert "static and continuous gave the same tokens." in out
    share = next(line for line in out.splitlines() if "useful share" in line)
    assert share.split()[-1] == "100.0%"
    assert share.split()[-2] != "100.0%"


@pytest.mark.usefixtures("no_pixels")
def test_a_step_has_a_token_for_each_of_many_rows(demo: Any) -> None:
    out, _ = demo("--max-num-seqs", "2100", *SHORT)
    assert "static and continuous gave the same tokens." in out


@pytest.mark.usefixtures("no_pixels")
def test_newcomer_joins_mid_flight(demo: Any) -> None:
    _, trace = demo("--arrivals", "0,0,3", *THREE_ROWS, *SHORT)
    assert [record["step"] for record in trace if "r2" in record["admitted"]] == [3]
    assert {row["phase"] for row in trace[3]["batch"]} == {"decode", "prefill"}


@pytest.mark.usefixtures("no_pixels")
def test_random_arrivals(demo: Any) -> None:
    out, trace = demo("--rate", "500", *SHORT)
    assert sorted(name for record in trace for name in record["admitted"]) == ["r0", "r1", "r2"]
    assert "same tokens" in out


def admissions(trace: list[dict[str, Any]]) -> list[int]:
    """Prompt lengths in the order of admission: ids differ when a later request comes first."""
    return [
        row["num_new_tokens"] for record in trace for row in record["batch"] if not row["start"]
    ]


@pytest.mark.usefixtures("no_pixels")
def test_priority_serves_the_most_urgent_first(demo: Any) -> None:
    prompts = ["--prompts", "one", "one two", "one two three"]
    one_row = ["--max-num-seqs", "1", "--no-static", *SHORT, *prompts]
    assert admissions(demo(*one_row)[1]) == [1, 2, 3]
    priority = ["--policy", "priority"]
    assert admissions(demo(*one_row, *priority)[1]) == [3, 2, 1]
    assert admissions(demo(*one_row, *priority, "--priorities", "2,0,1")[1]) == [2, 3, 1]
    assert "try --max-num-seqs 1" in " ".join(demo(*SHORT, *THREE_ROWS, *priority)[0].split())
    assert "changes nothing without --policy" in demo(*SHORT, "--priorities", "2,0,1")[0]


@pytest.mark.usefixtures("no_pixels")
def test_step_budgets_are_compared(demo: Any) -> None:
    out, trace = demo("--max-num-batched-tokens", "32,2048", *THREE_ROWS, *SHORT)
    assert "budget 32" in out
    assert "budget 2048" in out
    admitted = [record["step"] for record in trace for _ in record["admitted"]]
    assert admitted == [0, 0, 1], "3 + 26 tokens fill a step of 32"
    assert "same tokens" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-num-batched-tokens", "16"], "the prompt has 26 tokens"),
        (["--max-num-batched-tokens", "1"], "max_num_seqs=2"),
        (["--max-model-len", "20"], "max_model_len=20"),
        (["--arrivals", "0,1"], "--arrivals has 2 of the 3 numbers that it needs"),
        (["--priorities", "1"], "--priorities has 1 of the 3 numbers that it needs"),
    ],
)
def test_bad_values_end_with_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--model", "tiny-llama", "--no-static", "--out", str(tmp_path)]
    assert main([*options, *arguments]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ["--arrivals", "0,-1,0"],
        ["--arrivals", "a,b,c"],
        ["--rate", "0"],
        ["--rate", "nan"],
        ["--arrivals", "0,0,0", "--rate", "1"],
        ["--policy", "lifo"],
        ["--max-num-batched-tokens", "0"],
    ],
)
def test_bad_options_end_with_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: python -m m2_batching.demo" in capsys.readouterr().err
