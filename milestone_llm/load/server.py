"""A server of our own in another process, for as long as it is measured."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from milestone_llm.core.errors import InputError


@dataclass(frozen=True)
class RunningServer:
    """Where a server listens, and its process."""

    url: str
    pid: int

    def cpu_seconds(self) -> tuple[float, float]:
        """CPU time so far: of HTTP's process, and of those with engines."""
        children = set(Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())
        engines = set(filter(_has_torch, children))
        return _cpu_seconds({str(self.pid), *children} - engines), _cpu_seconds(engines)


@contextmanager
def running_server(words: Sequence[str]) -> Iterator[RunningServer]:
    """A server that is there while the block runs.

    Args:
        words: of its command line, from the module on; the port is chosen here.

    Raises:
        InputError: it did not start; it has said why.
    """
    command = [sys.executable, "-m", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if said := re.search(r" at (http://\S+)\n", line):
                    yield RunningServer(said[1], process.pid)
                    return
            raise InputError(f"the server did not start: {shlex.join(command)}")
        finally:
            process.terminate()
            process.stdout.read()  # what it says until it ends must go somewhere


def door_of(milestone: str, step_ms: float | None = None, token_ms: float = 0.0) -> list[str]:
    """The module that serves a milestone; with `step_ms`, the one whose steps only wait."""
    if step_ms is None:
        return [f"{milestone}.serve"]
    times = ["--step-ms", f"{step_ms:g}", "--token-ms", f"{token_ms:g}"]
    return ["milestone_llm.serving.timed", milestone, *times]


def _cpu_seconds(pids: set[str]) -> float:
    stats = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(fields[11]) + int(fields[12]) for fields in stats) / os.sysconf("SC_CLK_TCK")


def _has_torch(pid: str) -> bool:
    """Whether a process has an engine: those of HTTP load no torch."""
    return b"libtorch" in Path(f"/proc/{pid}/maps").read_bytes()
