"""How kernels are timed here: CUDA graph replays over rotating inputs, measured ceilings."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from milestone_llm.command.cli import add_options, run_command
from milestone_llm.core.errors import InputError

L2_BYTES = 256 * 2**20  # several times the largest L2 cache: inputs that rotate over this miss it
MAX_ERROR = 1e-2  # of bf16 operands against fp32 ones
FiveTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def gpu_command(parser: argparse.ArgumentParser, body: Callable[[argparse.Namespace], None]) -> int:
    """Run an instrument that needs a GPU. Returns the exit status."""
    add_options(parser, "threads")

    def run(args: argparse.Namespace) -> None:
        if not torch.cuda.is_available():
            raise InputError("this measures an NVIDIA GPU, and torch sees none here")
        body(args)

    return run_command(run, parser.parse_args())


def median_us(
    launches: Sequence[Callable[[], object]], repeats: int = 7, min_us: float = 2e4
) -> float:
    """Median microseconds of one launch, L2-cold if the launches' inputs together exceed the L2.

    All launches are captured in one CUDA graph (no launch gaps from Python) that is replayed
    `repeats` times between events; the graph holds each launch often enough to last `min_us`.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:  # compiles, allocates
            launch()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for launch in launches:
            launch()
        end.record()
    torch.cuda.current_stream().wait_stream(stream)
    end.synchronize()
    rounds = max(1, min(50, int(min_us / (start.elapsed_time(end) * 1e3 + 1))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    graph.replay()
    times = []
    for _ in range(repeats):
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (rounds * len(launches)))
    return statistics.median(times)


def num_rotations(bytes_per_launch: float) -> int:
    """Input sets needed so that a launch finds none of its inputs in the L2 cache."""
    return max(1, min(64, int(L2_BYTES / bytes_per_launch) + 1))


@dataclass(frozen=True)
class Ceilings:
    """What this GPU does at best: reading, copying (read + written), bf16 matrix products."""

    read_gbps: float
    copy_gbps: float
    matmul_tflops: float

    @classmethod
    def measure(cls) -> Ceilings:
        """About a second on a large GPU; needs 5 GiB."""
        source = torch.randn(2**30, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        copy_us = median_us([lambda: torch.neg(source, out=target)])  # a copy node is slower
        read_us = median_us([lambda: source.view(torch.int32).amax()])
        left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        right = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        matmul_us = median_us([lambda: left @ right])
        return cls(2**31 / read_us / 1e3, 2**32 / copy_us / 1e3, 2 * 8192**3 / matmul_us / 1e6)

    def __str__(self) -> str:
        return (
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}: read "
            f"{self.read_gbps:.0f} GB/s, copy {self.copy_gbps:.0f} GB/s, "
            f"bf16 matmul {self.matmul_tflops:.0f} TFLOP/s"
        )


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """||output - reference|| / ||reference||, NaN if any element is."""
    reference = reference.double()
    return float((output.double() - reference).norm() / reference.norm().clamp(min=1e-30))


def check(name: str, output: torch.Tensor, reference: torch.Tensor) -> None:
    """Raise RuntimeError unless output is the reference, floats up to bf16 rounding."""
    error = relative_error(output, reference)
    limit = MAX_ERROR if output.is_floating_point() else 0
    if not error <= limit:  # a NaN is no match either
        raise RuntimeError(f"{name}: relative error {error} against its twin")


@dataclass(frozen=True)
class PagedBatch:
    """Random sequences in a paged cache whose blocks lie scattered, as after hours of serving."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor

    @property
    def decode_inputs(self) -> FiveTensors:
        """What a decode kernel takes; a prefill kernel takes `query_start_loc`, too."""
        return self.query, self.key_cache, self.value_cache, self.block_table, self.context_lens

    @classmethod
    def random(
        cls,
        context_lens: Sequence[int],
        query_lens: Sequence[int],
        num_q_heads: int = 16,
        num_kv_heads: int = 8,
        head_dim: int = 128,
        block_size: int = 16,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
    ) -> PagedBatch:
        """Unused block-table entries are out of range, so that reading them shows."""
        counts = [-(-length // block_size) for length in context_lens]
        num_blocks = max(1, sum(counts))
        ids = torch.randperm(num_blocks, device=device).int()
        width = -(-max([1, *counts]) // 16) * 16
        table = torch.full((len(counts), width), 2**30, dtype=torch.int32, device=device)
        start = 0
        for row, count in enumerate(counts):
            table[row, :count] = ids[start : start + count]
            start += count
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        return cls(
            query=torch.randn(sum(query_lens), num_q_heads, head_dim, dtype=dtype, device=device),
            key_cache=torch.randn(shape, dtype=dtype, device=device),
            value_cache=torch.randn(shape, dtype=dtype, device=device),
            block_table=table,
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            query_start_loc=starts.to(device),
        )
