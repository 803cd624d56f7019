"""Bring a few numbers to the host: a kernel writes them there, not the copy engine.

    GPU memory   | tokens |  --- one program --->  | pinned memory |   over PCIe

Between two steps a copy of four bytes costs 10 us: the GPU hands over to its copy engine, and the
next step waits until the engine has handed back. With a kernel nothing is handed over. For many
numbers the copy engine would be better, since it copies while kernels run.
"""

from __future__ import annotations

import torch

from m5_kernels.kernels.launch import PLAIN, Launch
from m5_kernels.kernels.triton_or_twin import ceil_div, tl, triton


def write_to_host(source: torch.Tensor, target: torch.Tensor, launch: Launch = PLAIN) -> None:
    """Do `target.copy_(source)`, without waiting.

    source: int32 `[n]`, contiguous; target: int32 `[n]`, in pinned memory if source is on a GPU.
    Torch does not know of this write: the caller must keep target alive until it is done.
    """
    if not launch.runs_triton(source):
        write_to_host_torch(source, target)
        return
    block = 1024
    launch.kernel(_write_to_host_kernel, (ceil_div(len(source), block),))(
        source, target, len(source), BLOCK=block, num_warps=4
    )


@triton.jit(do_not_specialize=["number"])
def _write_to_host_kernel(source, target, number, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + index, mask=index < number)
    tl.store(target + index, values, mask=index < number)


def write_to_host_torch(source: torch.Tensor, target: torch.Tensor) -> None:
    """Specify `write_to_host`."""
    target.copy_(source)
