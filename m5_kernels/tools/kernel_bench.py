"""Each kernel against the limit of the GPU: `python -m m5_kernels.tools.kernel_bench`

Kernels that move bytes are rated in GB/s, each input and output counted once, against the
fastest read and copy measured in the same run. Every kernel is first compared with its torch twin
on the very inputs that are timed; inputs rotate, so that no launch finds its own in the L2 cache.
Prefill is bound by arithmetic; docs/measurements/m5_prefill.md has its figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from m5_kernels.kernels.rms_norm import add_rms_norm, add_rms_norm_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write, rope_kv_write_torch
from m5_kernels.kernels.sample import sample, sample_torch
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch
from m5_kernels.kernels.tiles import decode_tile
from milestone_llm.command.cli import Formatter, console
from milestone_llm.lab.bench.report import table
from milestone_llm.trace.text import plural

from .attention_work import (
    DECODE_SHAPES,
    NUM_KV_HEADS,
    NUM_Q_HEADS,
    Shape,
    attention_runs,
    expected,
    microseconds,
)
from .measure import Ceilings, PagedBatch, check, gpu_command, median_us, num_rotations

HEAD_DIM, HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 128, 1024, 3072, 151_936  # Qwen3-0.6B's
# FlashAttention-3 with the same shapes and block size on an H200, GB/s.
FA3_DECODE = ["3841", "3376", "4131", "4135", "4101", "3674", "13.3 us"]
Rows = Iterator[list[str]]


def rated(name: str, us: float, rate: float, ceiling: float) -> list[str]:
    """A row: microseconds, what is moved or computed a second, and its share of the ceiling."""
    return [name, f"{us:.1f}", f"{rate:.0f}", f"{rate / ceiling:.0%}"]


def decode_rows(ceilings: Ceilings) -> Rows:
    """The seven decode shapes and two batches of unequal lengths."""
    tile = decode_tile(HEAD_DIM, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    for shape, by_fa3 in zip(DECODE_SHAPES, FA3_DECODE, strict=True):
        (us,) = microseconds(shape, HEAD_DIM, [tile])
        yield [*rated(shape.name, us, shape.speed(HEAD_DIM, us), ceilings.read_gbps), by_fa3]
    for name, lens in (
        ("256 x 100..2048", torch.randint(100, 2049, (256,)).tolist()),
        ("1 x 100000, 63 x 500", [500] * 31 + [100_000] + [500] * 32),
    ):
        batch = PagedBatch.random(lens, [1] * len(lens))
        launches = attention_runs(tile, [batch])
        check(name, launches[0](), expected(Shape(len(lens), 0), batch))
        us = median_us(launches)
        yield rated(name, us, Shape(1, sum(lens)).speed(HEAD_DIM, us), ceilings.read_gbps)


@dataclass
class Case:
    """A kernel that is bound by memory, its specification, and inputs that rotate."""

    name: str
    kernel: Callable[..., torch.Tensor]
    twin: Callable[..., torch.Tensor]
    inputs: Sequence[tuple[Any, ...]]
    """Arguments of one launch each."""
    num_bytes: float
    """Read and written by a launch."""

    def results(self, function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """What a function returns, and what it leaves in the tensors that it was given."""
        arguments = [x.clone() if torch.is_tensor(x) else x for x in self.inputs[0]]
        return [function(*arguments), *filter(torch.is_tensor, arguments)]

    def row(self, ceilings: Ceilings) -> list[str]:
        """Compare with the twin, and time."""
        for ours, theirs in zip(self.results(self.kernel), self.results(self.twin), strict=True):
            check(self.name, ours, theirs)
        us = median_us([partial(self.kernel, *arguments) for arguments in self.inputs])
        return rated(self.name, us, self.num_bytes / us / 1e3, ceilings.copy_gbps)


def elementwise_cases() -> Iterator[Case]:
    """Norms, SiLU * mul and rope + KV write, for a decode step and a prefill."""
    heads = NUM_Q_HEADS + 2 * NUM_KV_HEADS
    weight = torch.randn(HIDDEN_SIZE, device="cuda").bfloat16()
    head_weight = torch.randn(HEAD_DIM, device="cuda").bfloat16()
    angles = torch.rand(4096, HEAD_DIM // 2, device="cuda") * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    for tokens in (256, 16384):

        def rotating(width: int, tokens: int = tokens) -> list[torch.Tensor]:
            count = num_rotations(tokens * width * 2)
            return [torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(count)]

        size, num_bytes = f"{tokens}x{HIDDEN_SIZE}", tokens * HIDDEN_SIZE * 2
        add_norms = [(x, torch.randn_like(x), weight, 1e-6) for x in rotating(HIDDEN_SIZE)]
        yield Case(
            f"add_rms_norm {size}", add_rms_norm, add_rms_norm_torch, add_norms, num_bytes * 4
        )
        gates = [(x,) for x in rotating(2 * INTERMEDIATE_SIZE)]
        name = f"silu_mul {tokens}x{INTERMEDIATE_SIZE}"
        yield Case(name, silu_mul, silu_mul_torch, gates, gates[0][0].nbytes * 1.5)
        xs = rotating(heads * HEAD_DIM)
        shape = (len(xs) * tokens // 16, 16, NUM_KV_HEADS, HEAD_DIM)
        caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
        slots = torch.randperm(len(xs) * tokens, device="cuda").view(len(xs), tokens)
        positions = torch.randint(0, 4096, (tokens,), dtype=torch.int32, device="cuda")
        rest = (NUM_Q_HEADS, positions, cos_sin, head_weight, head_weight)
        writes = [
            (x, *caches, slot_mapping, *rest) for x, slot_mapping in zip(xs, slots, strict=True)
        ]
        name = f"rope_kv_write {tokens}x{heads}x{HEAD_DIM}"
        yield Case(name, rope_kv_write, rope_kv_write_torch, writes, xs[0].nbytes * 2)


def sample_cases() -> Iterator[Case]:
    """Sampling over Qwen3's vocabulary; GB/s counts one read of the logits, whatever is done."""
    for num_rows in (1, 256):
        count = num_rotations(num_rows * VOCAB_SIZE * 2)
        logits = [
            (torch.randn(num_rows, VOCAB_SIZE, device="cuda") * 3).bfloat16() for _ in range(count)
        ]
        for name, temperature, k, p, filters in (
            ("greedy", 0.0, 0, 1.0, False),
            ("temperature", 0.6, 0, 1.0, False),
            ("top-k 50", 0.6, 50, 1.0, True),
            ("top-k 50, top-p 0.95", 0.6, 50, 0.95, True),
        ):
            arguments = (
                torch.arange(num_rows, dtype=torch.int32, device="cuda"),
                torch.full((num_rows,), temperature, device="cuda"),
                torch.full((num_rows,), k, dtype=torch.int32, device="cuda"),
                torch.full((num_rows,), p, device="cuda"),
                torch.zeros(num_rows, device="cuda"),
                torch.arange(num_rows, device="cuda"),
                torch.arange(num_rows, dtype=torch.int32, device="cuda"),
                filters,
            )
            inputs = [(each, *arguments) for each in logits]
            name = f"{plural(num_rows, 'row')}, {name}"
            yield Case(name, sample, sample_torch, inputs, logits[0].nbytes)


def case_rows(cases: Callable[[], Iterator[Case]], ceilings: Ceilings) -> Rows:
    """A row of each kernel that reads and writes."""
    return (case.row(ceilings) for case in cases())


TABLES: dict[str, tuple[Callable[[Ceilings], Rows], str]] = {
    "decode": (decode_rows, "flash_decode, block 16|us|GB/s|of reading|FA3's GB/s"),
    "elementwise": (partial(case_rows, elementwise_cases), "others|us|GB/s|of copying"),
    "sample": (partial(case_rows, sample_cases), "sample, bf16 logits|us|GB/s|of copying"),
}
"""By name: what makes the rows, and the headings. FA3 is FlashAttention-3."""


def measure_kernels(args: argparse.Namespace) -> None:
    """Print one table, or all."""
    ceilings = Ceilings.measure()
    console.print(str(ceilings), soft_wrap=True)
    for name, (make_rows, headings) in TABLES.items():
        if args.kernel in (name, "all"):
            console.print()
            console.print(table("", headings.split("|"), make_rows(ceilings)))
            torch.cuda.empty_cache()


def main() -> int:
    """The command line. Returns the exit status."""
    name = "python -m m5_kernels.tools.kernel_bench"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=Formatter)
    parser.add_argument("--kernel", choices=[*TABLES, "all"], default="all")
    return gpu_command(parser, measure_kernels)


if __name__ == "__main__":
    sys.exit(main())
