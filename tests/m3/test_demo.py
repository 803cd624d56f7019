"""M3's demo, run end to end on a tiny model: preemption, resumption and copies must show."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import m3_paged
from engine_helpers import greedy, tiny_model
from m3_paged import LLMEngine
from m3_paged.demo import main, parser, small_pool
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.lab.demo.work import Work
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.trace.jsonl import read_run

PNG = b"\x89PNG\r\n"


@pytest.fixture
def demo(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    """Runs the demo with options; returns what it printed and its trace."""

    def run(*arguments: str) -> tuple[str, list[dict[str, Any]]]:
        trace = tmp_path / "trace.jsonl"
        options = ["--model", "tiny-llama", "--out", str(tmp_path), "--trace", str(trace)]
        assert main([*options, *arguments]) == 0
        captured = capsys.readouterr()
        assert not captured.err.strip()
        pictures = [tmp_path / "m3_timeline.png", tmp_path / "m3_kvmap.png"]
        last_lines = captured.out.rstrip().splitlines()[-2:]
        assert last_lines == [f"timeline: {pictures[0]}", f"kvmap: {pictures[1]}"]
        assert all(picture.read_bytes().startswith(PNG) for picture in pictures)
        lines = captured.out.splitlines()[:-2]
        assert max(map(len, lines)) <= 80
        return captured.out, [record.to_dict() for record in read_run(trace)]

    return run


def first_step_with(trace: list[dict[str, Any]], change: str) -> int:
    return next(record["step"] for record in trace if record[change])


def test_preemption_and_resumption_happen_on_screen(demo: Any) -> None:
    out, trace = demo()
    preempted, resumed = first_step_with(trace, "preempted"), first_step_with(trace, "resumed")
    assert 0 < preempted < resumed
    for what, step in (
        ("The first step", 0),
        ("The pool is as good as full", preempted - 1),
        ("A preemption: a block is needed and none is free", preempted),
        ("A resumption: the preempted request is back", resumed),
    ):
        assert f"{what} (step {step})" in out
    assert f"preempted {trace[preempted]['preempted'][0]['request_id']}: no free block" in out
    assert "resumed   r" in out
    maps = out.split("\nblocks   ")[1:]
    assert len(maps) == 4
    cells = maps[0].splitlines()[1].split()
    owner = {row["blocks"][0]: row["request_id"] for row in trace[0]["batch"]}
    assert cells[1:13:2] == [owner[block] for block in range(6)]
    assert cells[13:] == ["-", "-"]


@pytest.mark.usefixtures("no_pixels")
def test_swap_gives_the_tokens_of_a_pool_with_room(demo: Any) -> None:
    roomy, trace = demo("--kv-cache-tokens", "4096")
    assert not any(record["preempted"] for record in trace)
    assert "The pool at its fullest" in roomy
    out, trace = demo("--preemption", "swap")
    kinds = {event["type"] for record in trace for event in record["events"]}
    assert {"swap_out", "swap_in"} <= kinds
    assert "0 tokens recomputed" in out
    assert "swapped 1: r5" in out
    answers = [text.split("Answers")[1].split("Requests")[0] for text in (roomy, out)]
    assert answers[0] == answers[1]


@pytest.mark.usefixtures("no_pixels")
def test_completions_share_blocks_and_copy_on_write(demo: Any) -> None:
    out, trace = demo("--n", "3")
    copies = [e for record in trace for e in record["events"] if e["type"] == "copy_on_write"]
    assert "Copy-on-write: a sharer writes into a shared block" in out
    assert "r0+2" not in out.split("Copy-on-write")[0]
    assert f" copies on write      {len(copies)} blocks" in out
    answers = out.split("Answers")[1]
    assert all(name in answers for name in ("r0/1", "r0/2", "r1/1", "r2/2"))


@pytest.mark.usefixtures("no_pixels")
def test_full_prompt_blocks_stay_shared(demo: Any) -> None:
    out, _ = demo("--n", "2", "--block-size", "2", "--max-tokens", "9")
    assert "by r0 r0/1" in out
    assert "saved by sharing" in out
    assert "r0+1" in out


@pytest.mark.usefixtures("no_pixels")
def test_own_prompts_and_lengths(demo: Any) -> None:
    out, trace = demo("--prompts", "one two three", "four five", "--max-tokens", "7")
    assert "3 token ids" in out
    assert sum(len(record["admitted"]) for record in trace) == 2


def test_a_step_holds_the_longest_prompt_and_a_token_of_each_row() -> None:
    """The demo has no option for a step's tokens: nobody could raise them."""
    config = m3_paged.EngineConfig

    def tokens_of_a_step(prompt_len: int, *options: str) -> int:
        milestone = SimpleNamespace(EngineConfig=config, LLMEngine=lambda model, **told: told)
        loaded = LoadedModel(tiny_model(max_position_embeddings=4096), None, "tiny")
        item = WorkItem([5] * prompt_len, greedy(2))
        told = Work(parser().parse_args(options), loaded, [item]).engine(milestone)
        return told["max_num_batched_tokens"]

    assert tokens_of_a_step(30) == config.max_num_batched_tokens == 2048
    assert tokens_of_a_step(3000) == 3002
    assert tokens_of_a_step(3000, "--max-num-seqs", "3500") == 3500


def test_the_pool_is_made_for_tokens_that_the_model_can_have() -> None:
    args = parser().parse_args([])
    loaded = LoadedModel(tiny_model(), None, "tiny")
    for max_tokens in (1000, 10**12):
        work = Work(args, loaded, [WorkItem([5] * 24, greedy(max_tokens))] * 3)
        assert small_pool(args, work) == 1536


@pytest.mark.usefixtures("no_pixels")
def test_console_trace_leaves_only_the_maps(
    demo: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("LLM_TRACE", "1")
    assert main(["--model", "tiny-llama", "--out", str(tmp_path), "--max-tokens", "20"]) == 0
    out = capsys.readouterr().out
    assert out.count("── step 0 ") == 1
    assert "\nblocks   " in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-cache-tokens", "50"], "3 KV blocks of 16 hold 48 tokens"),
        (["--n", "9"], "n=9 completions start together, but max_num_seqs=8"),
        (["--temperature", "-1"], "temperature must be a number from 0"),
    ],
)
def test_bad_input_ends_with_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["--model", "tiny-llama", "--out", str(tmp_path), *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_interrupt_ends_cleanly(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    step = LLMEngine.step

    def interrupted(engine: LLMEngine) -> Any:
        if engine.stats()["steps"] == 3:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(LLMEngine, "step", interrupted)
    assert main(["--model", "tiny-llama", "--out", str(tmp_path)]) == 130
    assert "Unfinished requests were aborted" in capsys.readouterr().err
