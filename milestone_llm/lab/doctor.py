"""Facts for a bug report, and what makes this machine slow: `python -m milestone_llm.lab.doctor`

Prints versions, devices, memory, load, and which parts an engine would use here and why not the
others; and ends with what to do about what it found. Takes a few seconds.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

from m3_paged.config import EngineConfig
from milestone_llm.lab.cli import Formatter, console
from milestone_llm.lab.threads import in_the_way, product_times

Rows = Iterator[tuple[str, str]]

PACKAGES = ("milestone-llm", "torch", "triton", "transformers", "gguf", "rich", "matplotlib")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status, 0 whatever is found."""
    argparse.ArgumentParser(
        "python -m milestone_llm.lab.doctor", description=__doc__, formatter_class=Formatter
    ).parse_args(arguments)
    advice: list[str] = []
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for section in (_software(advice), _machine(advice), _engine(advice), _extras()):
        for name, text in section:
            table.add_row(name, text)
        table.add_section()
    console.print(table)
    console.print()
    for line in advice or ["Nothing here stands in the way."]:
        console.print(f"- {line}" if advice else line, soft_wrap=True)
    return 0


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _software(advice: list[str]) -> Rows:
    yield "python", f"{platform.python_version()}, {platform.platform()}"
    for package in PACKAGES:
        yield package, _version(package) or "not installed"
    if _version("triton") is None:
        advice.append("Triton is not installed: M5 runs the torch twins of its kernels.")


def _machine(advice: list[str]) -> Rows:
    import torch

    from milestone_llm.models.machine import usable_cores

    usable, num_threads = usable_cores(), torch.get_num_threads()
    cores = f"{usable} core{'s' * (usable > 1)}"
    text = f"{usable} usable, torch takes {num_threads} thread{'s' * (num_threads > 1)}"
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
        text += f", load {load:.1f} in the last minute"
        if load > usable:
            advice.append(f"{load:.1f} processes want {cores}. Wait, or take --threads 1.")
    yield "CPU cores", text
    if num_threads > usable:
        advice.append(f"torch takes {num_threads} threads on {cores}: --threads {usable}.")
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


def _engine(advice: list[str]) -> Rows:
    import torch

    has_triton = importlib.util.find_spec("triton") is not None
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(num_gpus):
        free, total = (size / 2**30 for size in torch.cuda.mem_get_info(index))
        name = torch.cuda.get_device_name(index)
        yield f"GPU {index}", f"{name}, {free:.1f} of {total:.1f} GiB free"
        if free < total / 2:
            advice.append(f"GPU {index} is half full: engines get gpu_memory_utilization of it.")
    if not num_gpus:
        yield "GPU", "none that torch sees: engines run on the CPU"
        if shutil.which("nvidia-smi"):
            advice.append("There is an NVIDIA driver, but this torch is built for the CPU.")
    rows = EngineConfig().on_device("cuda" if num_gpus else "cpu", ()).max_num_seqs
    yield "rows", f"{rows}, where no max_num_seqs is given"
    is_interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if not has_triton:
        yield "M5's kernels", "their torch twins: Triton is not installed"
    elif is_interpreted:
        yield "M5's kernels", "Triton, interpreted: right, and some thousand times slower"
        advice.append("TRITON_INTERPRET=1 is for tests; unset it for anything that is timed.")
    elif num_gpus:
        has_pdl = torch.version.hip is None and torch.cuda.get_device_capability() >= (9, 0)
        launch = "launched before the kernel before has ended" if has_pdl else "one after the other"
        yield "M5's kernels", f"Triton, {launch}"
    else:
        yield "M5's kernels", "their torch twins: there is no GPU"
    graphs = "of all but the largest steps, unless enforce_eager" if num_gpus else "none: no GPU"
    yield "CUDA graphs", graphs
    if num_gpus < 2:
        way = "NCCL would need a second GPU" if num_gpus else "gloo, between processes on the CPU"
    elif torch.cuda.can_device_access_peer(0, 1):
        way = "decode steps write to the other GPUs' memory, prompts go by NCCL"
    else:
        way = "NCCL: these GPUs cannot write to each other's memory"
    yield "all-reduce (tensor_parallel_size)", way


def _extras() -> Rows:
    from milestone_llm.models.gguf_cache import INSTALL_COMMAND, PACKAGE

    yield "SmolLM2", _version(PACKAGE) or f"not there: {INSTALL_COMMAND}"
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    yield "Chromium", chromium or "not there: tests of the explorer page are skipped"
    for package, what in (("fastapi", "the server"), ("ray", "replicas")):
        yield package, _version(package) or f"not installed: needed for {what}"


if __name__ == "__main__":
    sys.exit(main())
