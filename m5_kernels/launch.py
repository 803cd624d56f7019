"""Starts a command once a GPU, for `--tensor-parallel-size`. Nothing here imports torch."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from milestone_llm.cli import console, log_console

SIZE_HELP = "GPUs over which every layer is cut, a process each"


def is_rank_0() -> bool:
    """Whether this process is the one that speaks."""
    return os.environ.get("RANK", "0") == "0"


def start_ranks(module: str, size: int, arguments: Sequence[str] | None) -> None:
    """Start the command again under torchrun, and do not return; nothing if that has been done.

    Args:
        module: the command, as `python -m` takes it.
        arguments: of it; None: those of the command line.
    """
    if size == 1 or "RANK" in os.environ:
        return
    threads = max(1, (os.cpu_count() or 1) // size)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    sys.stdout.flush()
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={size}"]
    options = sys.argv[1:] if arguments is None else list(arguments)
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", module, *options])


def hush(args: argparse.Namespace) -> None:
    """On ranks other than 0, which do the same work: nothing is printed, and no file is kept."""
    if is_rank_0():
        return
    console.quiet = log_console.quiet = True
    for name in ("json", "markdown", "explore", "trace"):
        if hasattr(args, name):
            setattr(args, name, None)
    if hasattr(args, "out"):
        args.out = Path(tempfile.mkdtemp())
