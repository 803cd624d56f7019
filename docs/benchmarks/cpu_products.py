"""Time all products of a step of SmolLM2 with weights of 32, 16, 8 and 4 bits, on a CPU.

    python -m docs.benchmarks.cpu_products

Random weights in the model's shapes, LM head included. Milliseconds are the median of seven runs.
The last column says how much the product of one row reads in a second.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from m5_kernels.extras.quantization.cpu_int8 import CPUInt8Weight
from m5_kernels.extras.quantization.int4_weight import Int4Groups, Int4Weight
from milestone_llm.cli import positive
from milestone_llm.consoles import console
from milestone_llm.lab.bench.record import machine, versions
from milestone_llm.lab.bench.report import table

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)] * 30 + [(49152, 576)]
"""Query, key and value; output; gate and up; down; and the LM head."""
ROWS = (1, 4, 8, 16, 64, 256)
RUNS = 7


def four_bits(out_size: int, in_size: int) -> Int4Weight:
    """Return a random weight of 4-bit integers."""
    groups = in_size // 32
    nibbles = torch.randint(0, 256, (groups, 16, out_size), dtype=torch.uint8)
    return Int4Weight(
        out_size,
        in_size,
        Int4Groups(nibbles, torch.rand(groups, 1, out_size), torch.randn(groups, 1, out_size)),
    )


def eight_bits(out_size: int, in_size: int) -> CPUInt8Weight:
    """Return a random weight of 8-bit integers."""
    weight = CPUInt8Weight.zeros(out_size, in_size, "cpu")
    weight.integers.random_(-127, 128)
    return weight


KINDS: dict[str, tuple[float, torch.dtype, Callable[[int, int], Any]]] = {
    "float32": (4, torch.float32, lambda *shape: torch.randn(*shape)),
    "bfloat16": (2, torch.bfloat16, lambda *shape: torch.randn(*shape).bfloat16()),
    "8 bits, a scale a row": (1, torch.bfloat16, eight_bits),
    "4 bits, a scale for 32": (0.625, torch.bfloat16, four_bits),
}
"""Bytes of a weight, dtype of the inputs, and a function that makes a matrix."""


def milliseconds(work: Callable[[], object]) -> float:
    """Return the median duration of some runs."""
    work()
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


@torch.inference_mode()
def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a line for each kind of weight."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=positive, default=None, help="default: torch's")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    num_weights = sum(out_size * in_size for out_size, in_size in SHAPES)
    lines = []
    for name, (num_bytes, dtype, make) in KINDS.items():
        weights = [make(*shape) for shape in SHAPES]
        times = []
        for num_rows in ROWS:
            inputs = {k: torch.randn(num_rows, k).to(dtype) for _, k in SHAPES}

            def step(weights: list[Any] = weights, inputs: Any = inputs) -> None:
                for weight, (_, in_size) in zip(weights, SHAPES, strict=True):
                    if isinstance(weight, torch.Tensor):
                        F.linear(inputs[in_size], weight)
                    else:
                        weight.product(inputs[in_size])

            times.append(milliseconds(step))
        rate = num_bytes * num_weights / times[0] / 1e6
        lines.append([name, *(f"{each:.1f}" for each in times), f"{rate:.1f}"])
    console.print(f"{torch.get_num_threads()} threads; {machine()}; {versions()}")
    headings = ["ms for rows:", *map(str, ROWS), "GB/s"]
    console.print(table("", headings, lines))


if __name__ == "__main__":
    main()
