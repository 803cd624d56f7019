"""Run one of our servers in another process, for the time of a measurement."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from milestone_llm.core.errors import InputError


@contextmanager
def running_server(words: Sequence[str]) -> Iterator[str]:
    """Start a server, yield its URL, and end the server after the block.

    Args:
        words: its command line, from the module on; the port is chosen here.

    Raises:
        InputError: it did not start; its own output has the reason.
    """
    command = [sys.executable, "-m", *words, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if said := re.search(r" at (http://\S+)\n", line):
                    yield said[1]
                    return
            raise InputError(f"the server did not start: {shlex.join(command)}")
        finally:
            process.terminate()
            process.stdout.read()  # read what it prints until it ends, so that it can end


def server_command(
    milestone: str, step_ms: float | None = None, token_ms: float = 0.0
) -> list[str]:
    """The module that serves a milestone; with `step_ms`, the one whose steps only wait."""
    if step_ms is None:
        return [f"{milestone}.serve"]
    times = ["--step-ms", f"{step_ms:g}", "--token-ms", f"{token_ms:g}"]
    return ["milestone_llm.serving.timed", milestone, *times]
