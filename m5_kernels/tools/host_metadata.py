"""A decode step's metadata made on the host and copied: what M5's device state does away with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from m5_kernels.kernels.step_metadata import StepMetadata


@dataclass
class HostRequest:
    """What a scheduler on the host knows of a request that decodes."""

    last_token: int
    num_tokens: int
    num_prompt_tokens: int
    block_table: list[int]


def host_metadata(
    requests: Sequence[HostRequest], block_size: int, output: StepMetadata
) -> Callable[[], int]:
    """A call that fills `output` for one token of each request; it returns the bytes it copied.

    A list for each quantity, a tensor in pinned memory for each list, a transfer for each tensor.
    """
    width = output.block_table.shape[1]

    def send(target: torch.Tensor, values: list[Any]) -> int:
        pinned = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
        target.copy_(pinned, non_blocking=True)
        return pinned.nbytes

    def run() -> int:
        ids, positions, slots, lens, outputs, tables = [], [], [], [], [], []
        for request in requests:
            position = request.num_tokens - 1
            block = request.block_table[position // block_size]
            ids.append(request.last_token)
            positions.append(position)
            slots.append(block * block_size + position % block_size)
            lens.append(request.num_tokens)
            outputs.append(request.num_tokens - request.num_prompt_tokens)
            tables.append(request.block_table + [0] * (width - len(request.block_table)))
        return (
            send(output.input_ids, ids)
            + send(output.positions, positions)
            + send(output.slot_mapping, slots)
            + send(output.context_lens, lens)
            + send(output.output_positions, outputs)
            + send(output.query_start_loc, list(range(len(requests) + 1)))
            + send(output.block_table, tables)
        )

    return run


def host_and_ready_us(call: Callable[[], object], repeats: int = 51) -> tuple[float, float]:
    """Median microseconds until a call returns, and until the GPU has done what it asked for."""
    host, ready = [], []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        ready.append(time.perf_counter() - start)
    return 1e6 * sorted(host)[repeats // 2], 1e6 * sorted(ready)[repeats // 2]
