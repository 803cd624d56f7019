"""Measure what the all-reduces of a decode step cost, by the number of its rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from m5_kernels.extras.tensor_parallel.collectives import Collectives
from m5_kernels.kernels.rms_norm import add_rms_norm
from milestone_llm.consoles import console
from milestone_llm.lab.bench.report import table

NUM_CALLS, NUM_ROUNDS = 48, 5
ROWS = (1, 16, 64, 256)


@torch.inference_mode()
def print_all_reduces(engine: Any) -> list[dict[str, float]]:
    """Time an all-reduce followed by the norm, as the engine does it and by NCCL.

    Every rank has to call it.

    Returns:
        A row for each number of rows: microseconds of each way, and of all all-reduces of a step.
    """
    decoder = engine.decoder
    shape, max_num_seqs = decoder.config, engine.config.max_num_seqs
    sums = Collectives(
        dist.get_rank(), dist.get_world_size(), shape.hidden_size, max_num_seqs, decoder.dtype,
        decoder.device,
    )  # fmt: skip
    num_sums = 2 * len(shape.windows) + 1
    console.print(
        f"\nAll-reduce and norm of {shape.hidden_size} numbers a row, {num_sums} in a step. "
        f"The engine's way: {sums.all_reduce_name}"
    )
    found, cells = [], []
    for rows in (rows for rows in ROWS if rows <= max_num_seqs):
        part = torch.zeros(rows, shape.hidden_size).to(decoder.embedding)
        norm = (torch.zeros_like(part), decoder.final_norm, shape.rms_norm_eps)
        own = microseconds(lambda x, norm: sums.add_norm(x, *norm), part, norm)
        other = microseconds(lambda x, norm: add_rms_norm(sums.all_reduce(x), *norm), part, norm)
        found.append({"rows": rows, "own_us": own, "library_us": other, "step_us": own * num_sums})
        cells.append([str(rows), f"{own:.1f}", f"{other:.1f}", f"{own * num_sums:.0f}"])
    headings = ["rows", "engine's way, us", "NCCL, then the norm, us", "a step, us"]
    console.print(table("", headings, cells))
    return found


def microseconds(call: Callable[..., torch.Tensor], part: torch.Tensor, norm: Any) -> float:
    """Time one call. Many run in a row in a CUDA graph, as many on each rank."""
    call(part, norm)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream(part.device)):
        for _ in range(NUM_CALLS):
            call(part, norm)
    graph.replay()
    torch.cuda.synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(NUM_ROUNDS):
        graph.replay()
    torch.cuda.synchronize()
    return 1e6 * (time.perf_counter() - start) / NUM_ROUNDS / NUM_CALLS
