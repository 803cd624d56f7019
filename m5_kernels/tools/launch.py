"""Start a command once for each GPU, for `--tensor-parallel-size`. Nothing here imports torch."""

from __future__ import annotations

import argparse
import atexit
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 5.0
"""How long to wait for another rank to end."""
SIZE_HELP = "GPUs over which every layer is cut, a process each"


def is_rank_0() -> bool:
    """Return whether this process is rank 0, which prints."""
    return os.environ.get("RANK", "0") == "0"


def start_ranks(module: str, size: int, arguments: Sequence[str] | None) -> None:
    """Become rank 0, and start the same command as the other ranks, as torchrun would.

    Do nothing if torchrun or a rank 0 has done that already. The others end with this process.

    Args:
        module: the command, as `python -m` takes it.
        arguments: of the command; None: those of the command line.
    """
    if size <= 1 or "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, (os.cpu_count() or 1) // size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    os.environ |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    options = sys.argv[1:] if arguments is None else arguments
    command = [sys.executable, "-m", module, *options]
    for rank in range(size):
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank:
            atexit.register(_end, subprocess.Popen(command))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0"}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Wait a short time for another rank to see that this one has ended, then kill it."""
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        process.kill()


def silence(args: argparse.Namespace) -> None:
    """Print nothing and keep no file on ranks other than 0, which do the same work."""
    if is_rank_0():
        return
    from milestone_llm.consoles import console, log_console

    console.quiet = log_console.quiet = True
    for name in ("json", "markdown", "explore", "trace"):
        if hasattr(args, name):
            setattr(args, name, None)
    if hasattr(args, "out"):
        args.out = Path(tempfile.mkdtemp())
