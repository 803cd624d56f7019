"""Tools to measure and test kernels: timing, ceilings of this GPU, random paged batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

FiveTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def median_us(launches: Sequence[Callable[[], object]]) -> float:
    """Return the median microseconds of a launch, in a CUDA graph of many, where Python leaves no
    gaps.

    The launches are L2-cold if their inputs together exceed the L2 cache.
    """
    from triton.testing import do_bench_cudagraph  # imported here: triton may not be installed

    def launch_all() -> None:
        for launch in launches:
            launch()

    median: float = do_bench_cudagraph(launch_all, return_mode="median")
    return 1e3 * median / len(launches)


@dataclass(frozen=True)
class Ceilings:
    """The limits of this GPU: reading, copying (read + written), matrix products."""

    read_gbps: float
    copy_gbps: float
    matmul_tflops: float

    @classmethod
    def measure(cls, in_fp8: bool = False) -> Ceilings:
        """Measure them. It takes about a second on a large GPU, and needs 5 GiB.

        in_fp8: multiply in e4m3, not in bf16.
        """
        source = torch.randn(2**30, dtype=torch.bfloat16, device="cuda")
        target = torch.empty_like(source)
        copy_us = median_us([lambda: torch.neg(source, out=target)])  # a copy node is slower
        read_us = median_us([lambda: source.view(torch.int32).amax()])
        left = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        right = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
        multiply = partial(torch.matmul, left, right)
        if in_fp8:
            one, e4m3 = torch.ones((), device="cuda"), torch.float8_e4m3fn
            multiply = partial(
                torch._scaled_mm, left.to(e4m3), right.to(e4m3).t(), one, one, out_dtype=left.dtype
            )
        matmul_us = median_us([multiply])
        return cls(2**31 / read_us / 1e3, 2**32 / copy_us / 1e3, 2 * 8192**3 / matmul_us / 1e6)

    def __str__(self) -> str:
        return (
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}: read "
            f"{self.read_gbps:.0f} GB/s, copy {self.copy_gbps:.0f} GB/s, "
            f"bf16 matmul {self.matmul_tflops:.0f} TFLOP/s"
        )


def relative_error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return ||output - reference|| / ||reference||; NaN if any element is NaN."""
    reference = reference.double()
    return float((output.double() - reference).norm() / reference.norm().clamp(min=1e-30))


@dataclass(frozen=True)
class PagedBatch:
    """Random sequences in a paged cache, with blocks in random order as after hours of serving.

    Slots to which no token was written hold NaN.
    """

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    block_table: torch.Tensor
    context_lens: torch.Tensor
    query_start_loc: torch.Tensor

    @property
    def decode_inputs(self) -> FiveTensors:
        """The inputs of a decode kernel. A prefill kernel also takes `query_start_loc`."""
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
        """Make random sequences. Unused block-table entries are out of range, so reading one
        shows."""
        counts = [-(-length // block_size) for length in context_lens]
        num_blocks = max(1, sum(counts))
        ids = torch.randperm(num_blocks, device=device).int()
        shape = (num_blocks, block_size, num_kv_heads, head_dim)
        caches = [torch.randn(shape, dtype=dtype, device=device) for _ in "kv"]
        width = -(-max([1, *counts]) // 16) * 16
        table = torch.full((len(counts), width), 2**30, dtype=torch.int32, device=device)
        for row, own in enumerate(ids.split([*counts, num_blocks - sum(counts)])[:-1]):
            table[row, : len(own)] = own
            for cache in caches:
                cache[own[-1:].long(), (context_lens[row] - 1) % block_size + 1 :] = torch.nan
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        return cls(
            query=torch.randn(sum(query_lens), num_q_heads, head_dim, dtype=dtype, device=device),
            key_cache=caches[0],
            value_cache=caches[1],
            block_table=table,
            context_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
            query_start_loc=starts.to(device),
        )
