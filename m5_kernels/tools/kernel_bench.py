"""Compare each kernel with the limit of the GPU: `python -m m5_kernels.tools.kernel_bench`

Kernels that move bytes are rated in GB/s, with each input and output counted once, and compared
with the fastest read and copy measured in the same run. Before that, every kernel is compared with
its torch twin on the inputs that are timed. Inputs rotate, so that no launch finds its inputs in
the L2 cache. Prefill is bound by arithmetic; docs/measurements/m5_prefill.md has its figures.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode, flash_decode_torch
from m5_kernels.kernels.rms_norm import add_rms_norm, add_rms_norm_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write, rope_kv_write_torch
from m5_kernels.kernels.sample import sample, sample_torch
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch
from milestone_llm.cli import Formatter, add_options, run_command
from milestone_llm.consoles import console
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.report import table
from milestone_llm.trace.text import plural

from .measure import Ceilings, PagedBatch, median_us, relative_error

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128  # Qwen3-0.6B's
HIDDEN_SIZE, INTERMEDIATE_SIZE, VOCAB_SIZE = 1024, 3072, 151_936
L2_BYTES = 256 * 2**20  # several times the largest L2 cache, so that rotating inputs miss it
MAX_ERROR = 1e-2  # with bf16 operands, relative to fp32 ones


@dataclass
class Case:
    """A kernel that is bound by memory, its twin, and inputs that rotate."""

    name: str
    kernel: Callable[..., torch.Tensor]
    twin: Callable[..., torch.Tensor]
    inputs: Sequence[tuple[Any, ...]]
    """The arguments of each launch."""
    num_bytes: float
    """Bytes that a launch reads and writes."""

    def results(self, function: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        """Return what a function returns, and what it leaves in the tensors that it was given."""
        arguments = [x.clone() if torch.is_tensor(x) else x for x in self.inputs[0]]
        return [function(*arguments), *filter(torch.is_tensor, arguments)]

    def row(self, ceiling_gbps: float) -> list[str]:
        """Compare with the twin, and time. Returns microseconds, GB/s and their share of the
        limit."""
        for ours, theirs in zip(self.results(self.kernel), self.results(self.twin), strict=True):
            error = relative_error(ours, theirs)
            if not error <= (MAX_ERROR if ours.is_floating_point() else 0):  # nor may it be NaN
                raise RuntimeError(f"{self.name}: relative error {error} against its twin")
        us = median_us([partial(self.kernel, *arguments) for arguments in self.inputs])
        gbps = self.num_bytes / us / 1e3
        return [self.name, f"{us:.1f}", f"{gbps:.0f}", f"{gbps / ceiling_gbps:.0%}"]


def num_rotations(bytes_per_launch: float) -> int:
    """Return how many sets of inputs keep a launch from finding its inputs in the L2 cache."""
    return max(1, min(64, int(L2_BYTES / bytes_per_launch) + 1))


def decode_cases() -> Iterator[Case]:
    """Yield Flash-Decoding of sequences of one length, and of two batches of unequal ones."""
    sizes = [(256, 1024), (256, 700), (64, 4096), (16, 16384), (8, 32768), (1, 131072), (1, 1024)]
    lens = {f"B{num_seqs}xL{length}": [length] * num_seqs for num_seqs, length in sizes}
    lens["256 x 100..2048"] = torch.randint(100, 2049, (256,)).tolist()
    lens["1 x 100000, 63 x 500"] = [500] * 31 + [100_000] + [500] * 32
    device = torch.device("cuda", torch.cuda.current_device())
    for name, own in lens.items():
        num_bytes = sum(own) * NUM_KV_HEADS * HEAD_DIM * 4
        workspace = DecodeWorkspace.allocate(
            len(own), NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, torch.bfloat16, device
        )

        def kernel(batch: PagedBatch, workspace: DecodeWorkspace = workspace) -> torch.Tensor:
            return flash_decode(*batch.decode_inputs, workspace=workspace)

        def twin(batch: PagedBatch) -> torch.Tensor:
            return flash_decode_torch(*batch.decode_inputs)

        rotations = range(num_rotations(num_bytes))
        batches = [(PagedBatch.random(own, [1] * len(own)),) for _ in rotations]
        yield Case(name, kernel, twin, batches, num_bytes)


def elementwise_cases() -> Iterator[Case]:
    """Yield norms, SiLU * mul and rope + KV write, for a decode step and a prefill."""
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
    """Yield sampling over Qwen3's vocabulary. GB/s counts one read of the logits in all cases."""
    for num_rows in (1, 256):
        rows = torch.arange(num_rows, dtype=torch.int32, device="cuda")
        logits = [
            (torch.randn(num_rows, VOCAB_SIZE, device="cuda") * 3).bfloat16()
            for _ in range(num_rotations(num_rows * VOCAB_SIZE * 2))
        ]
        for name, temperature, k, p, has_filters in (
            ("greedy", 0.0, 0, 1.0, False),
            ("temperature", 0.6, 0, 1.0, False),
            ("top-k 50", 0.6, 50, 1.0, True),
            ("top-k 50, top-p 0.95", 0.6, 50, 0.95, True),
        ):
            ones = torch.ones(num_rows, device="cuda")
            filters = (ones * temperature, (ones * k).int(), ones * p, ones * 0)
            rest = (rows, *filters, rows.long(), rows, has_filters)
            name = f"{plural(num_rows, 'row')}, {name}"
            inputs = [(each, *rest) for each in logits]
            yield Case(name, sample, sample_torch, inputs, logits[0].nbytes)


TABLES = (
    (decode_cases, "flash_decode, block 16|us|GB/s|of reading"),
    (elementwise_cases, "others|us|GB/s|of copying"),
    (sample_cases, "sample, bf16 logits|us|GB/s|of copying"),
)
"""The cases of each table, and its headings."""


def measure_kernels(args: argparse.Namespace) -> None:
    """Print all tables.

    Raises:
        InputError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise InputError("this measures an NVIDIA GPU, and torch sees none here")
    ceilings = Ceilings.measure()
    console.print(str(ceilings), soft_wrap=True)
    for cases, headings in TABLES:
        ceiling = ceilings.read_gbps if cases is decode_cases else ceilings.copy_gbps
        rows = [each.row(ceiling) for each in cases()]
        console.print("", table("", headings.split("|"), rows))
        torch.cuda.empty_cache()


def main() -> int:
    """Run the command line. Returns the exit status."""
    name = "python -m m5_kernels.tools.kernel_bench"
    parser = argparse.ArgumentParser(name, description=__doc__, formatter_class=Formatter)
    add_options(parser, "threads")
    return run_command(measure_kernels, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
