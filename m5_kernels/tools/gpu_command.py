"""The command line of instruments that want a GPU; torch is imported where there is one."""

from __future__ import annotations

import argparse
import ctypes
from collections.abc import Callable

from milestone_llm.cli import add_options, run_command

NO_GPU = "this measures kernels on an NVIDIA GPU, and there is none here"


def gpu_command(parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], None]) -> int:
    """Run an instrument, which ends with one line without a GPU. Returns the exit status."""
    add_options(parser, "threads")

    def run(args: argparse.Namespace) -> None:
        require_gpu()
        body(args)

    return run_command(run, parser.parse_args(), lambda args: require_driver())


def require_gpu() -> None:
    """Raise ValueError where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        raise ValueError(f"{NO_GPU} that torch sees")


def require_driver() -> None:
    """Raise ValueError on a machine without NVIDIA's driver: seconds before torch would say so."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        raise ValueError(NO_GPU) from None
