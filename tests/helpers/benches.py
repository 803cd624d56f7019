"""Run a bench in a test: one thread, both files written and read back, lines short enough.

A pytest plugin: `pytest_plugins = ["helpers.benches"]` in a test file brings the fixtures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch


class BenchRun(NamedTuple):
    """Output of a bench, on the console and in files."""

    out: str
    err: str
    data: dict[str, Any]
    markdown: str


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def run_bench(
    one_thread: None, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., BenchRun]:
    """Return a function that runs a bench's `main` with valid options."""

    def run(main: Callable[[list[str]], int], *arguments: str) -> BenchRun:
        data, table = tmp_path / "deep" / "bench.json", tmp_path / "deep" / "bench.md"
        assert main([*arguments, "--json", str(data), "--markdown", str(table)]) == 0
        out, err = capsys.readouterr()
        assert out.endswith(f"written: {data}\nwritten: {table}\n")
        assert max(map(len, out.splitlines()[:-2])) <= 80
        return BenchRun(out, err, json.loads(data.read_text()), table.read_text())

    return run
