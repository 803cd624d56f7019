"""How M5's commands come to run once a GPU, and that only one of the processes speaks."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from m5_kernels.tools import launch
from milestone_llm.consoles import console, log_console


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is started instead of processes: command, rank, size and port of each."""
    found: list[Any] = []

    def popen(command: list[str]) -> None:
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")
        found.append((command, *(os.environ[name] for name in names)))

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    monkeypatch.setattr(launch.atexit, "register", lambda *args: None)
    monkeypatch.setattr(launch.os, "environ", dict(os.environ) | {"OMP_NUM_THREADS": "1"})
    return found


def test_the_first_process_is_rank_0_and_starts_the_others(started):
    launch.start_ranks("m5_kernels.demo", 1, [])
    assert started == []
    launch.start_ranks("m5_kernels.demo", 3, ["--model", "tiny-llama"])
    command = [sys.executable, "-m", "m5_kernels.demo", "--model", "tiny-llama"]
    assert [each[0] for each in started] == [command, command]
    assert [each[1:4] for each in started] == [("1", "1", "3"), ("2", "2", "3")]
    assert started[0][4] == started[1][4] != "", "they meet at one port"
    assert (os.environ["RANK"], os.environ["LOCAL_RANK"]) == ("0", "0")
    launch.start_ranks("m5_kernels.demo", 3, [])  # so does torchrun say who one is
    assert len(started) == 2


def test_only_rank_0_prints_and_writes(started, monkeypatch):
    for each in (console, log_console):
        monkeypatch.setattr(each, "quiet", False)
    args = argparse.Namespace(json=Path("a.json"), trace="t.jsonl", out=Path("runs"), seed=3)
    os.environ["RANK"] = "0"
    launch.silence(args)
    assert (args.json, console.quiet) == (Path("a.json"), False)
    os.environ["RANK"] = "1"
    launch.silence(args)
    assert (args.json, args.trace, args.seed) == (None, None, 3)
    assert args.out != Path("runs")
    assert console.quiet
    assert log_console.quiet
