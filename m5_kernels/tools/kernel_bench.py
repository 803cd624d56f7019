"""`python -m m5_kernels.kernel_bench`: each kernel against what the GPU could do at best.

Kernels that move bytes are rated in GB/s, each input and output counted once, against the
fastest read and copy measured in the same run; prefill in TFLOP/s of causal attention against a
large matrix product. Every kernel is first compared with its torch twin on the very inputs that are
timed; inputs rotate, so that no launch finds its own in the L2 cache.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch

from m5_kernels.kernels.flash_decode import flash_decode_torch
from m5_kernels.kernels.paged_prefill import paged_prefill_torch
from m5_kernels.kernels.rms_norm import add_rms_norm, add_rms_norm_torch, rms_norm, rms_norm_torch
from m5_kernels.kernels.rope_kv_write import rope_kv_write, rope_kv_write_torch
from m5_kernels.kernels.sample import sample, sample_torch
from m5_kernels.kernels.silu_mul import silu_mul, silu_mul_torch
from m5_kernels.kernels.tiles import PrefillTile, decode_tile, prefill_tile

from .measure import Ceilings, PagedBatch, median_us, num_rotations, relative_error
from .tune import (
    DECODE_SHAPES,
    MAX_ERROR,
    PREFILL_SHAPES,
    Shape,
    decode_run,
    prefill_run,
    random_batch,
    speed,
)

HEAD_DIM, NUM_Q_HEADS, NUM_KV_HEADS = 128, 16, 8
# FlashAttention-3 with the same shapes and block size on an H200: GB/s, then TFLOP/s.
FA3_DECODE = [3841, 3376, 4131, 4135, 4101, 3674, None]
FA3_PREFILL = [388, 571, 616]


def check(name: str, output: torch.Tensor, reference: torch.Tensor) -> None:
    """Raise RuntimeError unless output is the reference up to bf16 rounding."""
    error = relative_error(output, reference)
    if not error < MAX_ERROR:  # a NaN is no match either
        raise RuntimeError(f"{name}: relative error {error} against its twin")


def bench_decode(ceilings: Ceilings) -> None:
    """The seven decode shapes and two batches of unequal lengths, in GB/s of KV read."""
    print("flash_decode, block 16      us     GB/s  of read ceiling   FlashAttention-3")
    tile = decode_tile(HEAD_DIM, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    for shape, reference in zip(DECODE_SHAPES, FA3_DECODE, strict=True):
        kv_bytes = shape.num_seqs * shape.context_len * NUM_KV_HEADS * HEAD_DIM * 4
        batches = [random_batch(shape, HEAD_DIM) for _ in range(num_rotations(kv_bytes))]
        launches = decode_run(tile, shape, HEAD_DIM, batches)
        b = batches[0]
        expected = flash_decode_torch(
            b.query, b.key_cache, b.value_cache, b.block_table, b.context_lens
        )
        check(shape.name, launches[0](), expected)
        us = median_us(launches)
        rate = speed(shape, HEAD_DIM, us, NUM_Q_HEADS, NUM_KV_HEADS)
        fa3 = f"{reference}" if reference else "13.3 us"
        print(
            f"  {shape.name:18s} {us:9.1f} {rate:8.0f} {rate / ceilings.read_gbps:16.0%} {fa3:>18s}"
        )

    for name, lens in (
        ("256 x 100..2048", torch.randint(100, 2049, (256,)).tolist()),
        ("1 x 100000, 63 x 500", [500] * 31 + [100_000] + [500] * 32),
    ):
        b = PagedBatch.random(lens, [1] * len(lens))
        launches = decode_run(tile, Shape(len(lens), 0), HEAD_DIM, [b])
        expected = flash_decode_torch(
            b.query, b.key_cache, b.value_cache, b.block_table, b.context_lens
        )
        check(name, launches[0](), expected)
        us = median_us(launches)
        rate = sum(lens) * NUM_KV_HEADS * HEAD_DIM * 4 / us / 1e3
        print(f"  {name:20s} {us:7.1f} {rate:8.0f} {rate / ceilings.read_gbps:16.0%}")


def bench_prefill(ceilings: Ceilings) -> None:
    """The three prefill shapes, in TFLOP/s (causal: half the score matrix)."""
    print("paged_prefill, block 16     us  TFLOP/s  of matmul ceiling FlashAttention-3")
    tile = prefill_tile(HEAD_DIM, torch.bfloat16, torch.device("cuda", torch.cuda.current_device()))
    for shape, reference in zip(PREFILL_SHAPES, FA3_PREFILL, strict=True):
        b = random_batch(shape, HEAD_DIM)
        launches = prefill_run(tile, [b])
        if shape.context_len <= 4096:
            expected = paged_prefill_torch(
                b.query, b.key_cache, b.value_cache, b.block_table, b.context_lens,
                b.query_start_loc,
            )  # fmt: skip
        else:  # the twin's score matrix would be too large: against another tiling
            expected = prefill_run(PrefillTile(64, 32, 4, 2), [b])[0]()
        check(shape.name, launches[0](), expected)
        us = median_us(launches)
        rate = speed(shape, HEAD_DIM, us, NUM_Q_HEADS, NUM_KV_HEADS)
        share = rate / ceilings.matmul_tflops
        print(f"  {shape.name:18s} {us:9.1f} {rate:8.0f} {share:16.0%} {reference:18d}")


def report(
    name: str, launches: Sequence[Callable[[], object]], num_bytes: float, ceilings: Ceilings
) -> None:
    """One line of the table of kernels that read and write."""
    us = median_us(launches)
    rate = num_bytes / us / 1e3
    print(f"  {name:28s} {us:9.1f} {rate:8.0f} {rate / ceilings.copy_gbps:16.0%}", flush=True)


def bench_elementwise(ceilings: Ceilings) -> None:
    """Norms, SiLU * mul and rope + KV write, for a decode step and a prefill."""
    print("others                              us     GB/s  of copy ceiling")
    hidden_size, size = 1024, 3072
    heads = NUM_Q_HEADS + 2 * NUM_KV_HEADS
    weight = torch.randn(hidden_size, device="cuda").bfloat16()
    head_weight = torch.randn(HEAD_DIM, device="cuda").bfloat16()
    angles = torch.rand(4096, HEAD_DIM // 2, device="cuda") * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1)
    for tokens in (256, 16384):

        def rows(width: int, tokens: int = tokens) -> list[torch.Tensor]:
            count = num_rotations(tokens * width * 2)
            return [torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(count)]

        xs = rows(hidden_size)
        check("rms_norm", rms_norm(xs[0], weight, 1e-6), rms_norm_torch(xs[0], weight, 1e-6))
        runs = [partial(rms_norm, x, weight, 1e-6) for x in xs]
        report(f"rms_norm {tokens}x{hidden_size}", runs, xs[0].nbytes * 2, ceilings)

        residuals = rows(hidden_size)
        expected = add_rms_norm_torch(xs[0], residuals[0].clone(), weight, 1e-6)
        check("add_rms_norm", add_rms_norm(xs[0], residuals[0], weight, 1e-6), expected)
        for residual in residuals:
            residual.zero_()  # it grows with each launch; from zero it stays finite
        runs = [
            partial(add_rms_norm, x, residual, weight, 1e-6)
            for x, residual in zip(xs, residuals, strict=True)
        ]
        report(f"add_rms_norm {tokens}x{hidden_size}", runs, xs[0].nbytes * 4, ceilings)

        xs = rows(2 * size)
        check("silu_mul", silu_mul(xs[0]), silu_mul_torch(xs[0]))
        runs = [partial(silu_mul, x) for x in xs]
        report(f"silu_mul {tokens}x{size}", runs, xs[0].nbytes * 1.5, ceilings)

        xs = rows(heads * HEAD_DIM)
        shape = (len(xs) * tokens // 16, 16, NUM_KV_HEADS, HEAD_DIM)
        caches = [torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(4)]
        slots = torch.randperm(len(xs) * tokens, device="cuda").view(len(xs), tokens)
        positions = torch.randint(0, 4096, (tokens,), dtype=torch.int32, device="cuda")
        rest = (NUM_Q_HEADS, positions, cos_sin, head_weight, head_weight)
        query = rope_kv_write(xs[0].clone(), caches[0], caches[1], slots[0], *rest)
        expected = rope_kv_write_torch(xs[0].clone(), caches[2], caches[3], slots[0], *rest)
        check("rope_kv_write, query", query, expected)
        check("rope_kv_write, keys", caches[0], caches[2])
        check("rope_kv_write, values", caches[1], caches[3])
        runs = [
            partial(rope_kv_write, x, caches[0], caches[1], slot_mapping, *rest)
            for x, slot_mapping in zip(xs, slots, strict=True)
        ]
        report(f"rope_kv_write {tokens}x{heads}x{HEAD_DIM}", runs, xs[0].nbytes * 2, ceilings)


def bench_sample(ceilings: Ceilings) -> None:
    """Sampling over Qwen3's vocabulary; GB/s counts one read of the logits, whatever is done."""
    print("sample, bf16 logits                 us     GB/s  of copy ceiling")
    vocab_size = 151_936
    for num_rows in (1, 256):
        count = num_rotations(num_rows * vocab_size * 2)
        batches = [
            (torch.randn(num_rows, vocab_size, device="cuda") * 3).bfloat16() for _ in range(count)
        ]
        seeds = torch.arange(num_rows, device="cuda")
        positions = torch.arange(num_rows, dtype=torch.int32, device="cuda")
        for name, temperature, k, p, filters in (
            ("greedy", 0.0, 0, 1.0, False),
            ("temperature", 0.6, 0, 1.0, False),
            ("top-k 50", 0.6, 50, 1.0, True),
            ("top-k 50, top-p 0.95", 0.6, 50, 0.95, True),
        ):
            arguments = (
                torch.full((num_rows,), temperature, device="cuda"),
                torch.full((num_rows,), k, dtype=torch.int32, device="cuda"),
                torch.full((num_rows,), p, device="cuda"),
                torch.zeros(num_rows, device="cuda"),
                seeds,
                positions,
                filters,
            )
            tokens, expected = sample(batches[0], *arguments), sample_torch(batches[0], *arguments)
            if not torch.equal(tokens, expected):
                raise RuntimeError(f"sample, {name}: {tokens} is not {expected}")
            runs = [partial(sample, x, *arguments) for x in batches]
            report(f"{num_rows} rows, {name}", runs, batches[0].nbytes, ceilings)


BENCHES = {
    "decode": bench_decode,
    "prefill": bench_prefill,
    "elementwise": bench_elementwise,
    "sample": bench_sample,
}


def main() -> None:
    """Measure the ceilings, then the kernels asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernel", choices=[*BENCHES, "all"], default="all")
    options = parser.parse_args()
    ceilings = Ceilings.measure()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: "
        f"read {ceilings.read_gbps:.0f} GB/s, "
        f"copy {ceilings.copy_gbps:.0f} GB/s, bf16 matmul {ceilings.matmul_tflops:.0f} TFLOP/s"
    )
    for name, bench in BENCHES.items():
        if options.kernel in (name, "all"):
            bench(ceilings)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
