"""Why split KV: Flash-Decoding with ever more programs for the same sequences.

With one program a KV head and sequence, as many multiprocessors work as there are such pairs: for
one long context that is eight of 132. The first line of each shape has that many programs.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from m5_kernels.kernels.flash_decode import DecodeWorkspace, flash_decode, flash_decode_torch

from .measure import Ceilings, PagedBatch, median_us, num_rotations, relative_error
from .tune import MAX_ERROR

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 16, 8, 128
SHAPES = ([131_072], [16_384], [2_048] * 16, [1_024] * 256)


def bench_split(ceilings: Ceilings) -> None:
    """Programs, microseconds and GB/s of KV read, for a few shapes; each checked first."""
    print("flash_decode, KV split among    programs     us     GB/s  of read ceiling")
    for lens in SHAPES:
        kv_bytes = sum(lens) * NUM_KV_HEADS * HEAD_DIM * 4
        batches = [PagedBatch.random(lens, [1] * len(lens)) for _ in range(num_rotations(kv_bytes))]
        full = DecodeWorkspace.allocate(
            len(lens), NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM, torch.bfloat16, "cuda"
        )
        most = full.programs_per_head
        counts = sorted({min(len(lens), most), *(n for n in (4, 16) if n < most), most})
        for count in (n for n in counts if n >= min(len(lens), most)):
            workspace = replace(full, programs_per_head=count)

            def run(batch: PagedBatch, workspace: DecodeWorkspace = workspace) -> torch.Tensor:
                return flash_decode(
                    batch.query, batch.key_cache, batch.value_cache, batch.block_table,
                    batch.context_lens, workspace=workspace,
                )  # fmt: skip

            first = batches[0]
            expected = flash_decode_torch(
                first.query, first.key_cache, first.value_cache, first.block_table,
                first.context_lens,
            )  # fmt: skip
            error = relative_error(run(first), expected)
            if not error < MAX_ERROR:
                raise RuntimeError(f"{lens[0]} x {len(lens)}, {count} programs: error {error}")
            us = median_us([lambda batch=batch, run=run: run(batch) for batch in batches])  # type: ignore[misc]
            rate = kv_bytes / us / 1e3
            print(
                f"  {len(lens):4d} sequences of {lens[0]:7,d} {count * NUM_KV_HEADS:10d} {us:9.1f}"
                f" {rate:8.0f} {rate / ceilings.read_gbps:12.0%}",
                flush=True,
            )
