"""A decode step's metadata: made on the host and copied, or expanded on the GPU from changes.

The second is what M5 does in a step: a sixteenth of the rows begins a block. Needs a GPU.
"""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from m5_kernels.device_state import DeviceState, StepSeq
from m5_kernels.kernels.backend import ceil_div
from m5_kernels.kernels.expand_step import expand_step
from m5_kernels.kernels.step_metadata import StepMetadata
from milestone_llm.command.cli import console
from milestone_llm.lab.bench.report import table
from milestone_llm.trace.text import plural

BLOCK_SIZE, CONTEXT_LEN, PROMPT_LEN = 16, 600, 100


class HostRequest(NamedTuple):
    """What a scheduler on the host knows of a request that decodes."""

    last_token: int
    num_tokens: int
    num_prompt_tokens: int
    block_table: list[int]


def make_on_host(requests: Sequence[HostRequest], block_size: int, output: StepMetadata) -> int:
    """Fill `output` for one token of each request; returns the bytes that were copied.

    A list for each quantity, a tensor in pinned memory for each list, a transfer for each tensor.
    """
    width, num_bytes = output.block_table.shape[1], 0
    positions = [request.num_tokens - 1 for request in requests]
    pairs = list(zip(requests, positions, strict=True))
    for target, values in (
        (output.input_ids, [request.last_token for request in requests]),
        (output.positions, positions),
        (
            output.slot_mapping,
            [r.block_table[p // block_size] * block_size + p % block_size for r, p in pairs],
        ),
        (output.context_lens, [request.num_tokens for request in requests]),
        (output.decode_lens, [request.num_tokens for request in requests]),
        (output.first_chunk, [len(requests)]),
        (output.output_positions, [r.num_tokens - r.num_prompt_tokens for r in requests]),
        (output.query_start_loc, list(range(len(requests) + 1))),
        (
            output.block_table,
            [r.block_table + [0] * (width - len(r.block_table)) for r in requests],
        ),
    ):
        pinned = torch.tensor(values, dtype=target.dtype, pin_memory=target.is_cuda)
        target.copy_(pinned, non_blocking=True)
        num_bytes += pinned.nbytes
    return num_bytes


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


def rows(num_rows: int) -> Iterator[list[str]]:
    """Both ways for so many rows; they must give the same."""
    device = torch.device("cuda", torch.cuda.current_device())
    state = DeviceState(num_rows, 2048, BLOCK_SIZE, 151_936, device)
    width, num_blocks = state.max_blocks, ceil_div(CONTEXT_LEN, BLOCK_SIZE)
    tables = torch.randperm(num_rows * width).view(num_rows, width).tolist()
    state.rows.token_ids.fill_(7)
    state.rows.num_computed_tokens.fill_(CONTEXT_LEN - 1)
    state.rows.prompt_lens.fill_(PROMPT_LEN)
    state.rows.block_table.copy_(torch.tensor(tables))
    step = [StepSeq(row, 1, True) for row in range(num_rows)]
    state.set_step(step)
    state.flush()
    ours, theirs = (StepMetadata.allocate(num_rows, num_rows, width, device) for _ in range(2))
    requests = [HostRequest(7, CONTEXT_LEN, PROMPT_LEN, table[:num_blocks]) for table in tables]
    changed = range(0, num_rows, BLOCK_SIZE)

    def on_host() -> int:
        return make_on_host(requests, BLOCK_SIZE, theirs)

    def on_gpu() -> None:
        for row in changed:
            state.set("block_table", row, [tables[row][num_blocks - 1]], column=num_blocks - 1)
        state.set_step(step)
        state.flush()
        expand_step(state.rows, *state.step(num_rows)[:2], ours)

    num_bytes = on_host()
    on_gpu()
    for name in ("input_ids", "positions", "slot_mapping", "context_lens", "output_positions"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    for name, call, size in (
        ("made on the host", on_host, num_bytes),
        ("expanded on the GPU", on_gpu, 16 * len(changed)),
    ):
        host_us, ready_us = host_and_ready_us(call)
        what = f"{plural(num_rows, 'row')}, {name}"
        yield [what, f"{size:,}", f"{host_us:.0f}", f"{ready_us:.0f}"]


if __name__ == "__main__":
    if not torch.cuda.is_available():
        sys.exit("This measures copies to a GPU and needs an NVIDIA GPU; torch finds none here.")
    headings = ["metadata of a decode step", "bytes sent", "us of the host", "us till there"]
    console.print(table("", headings, [*rows(1), *rows(256)]))
