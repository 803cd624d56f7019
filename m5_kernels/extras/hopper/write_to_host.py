"""A few numbers to the host, written there by a kernel instead of copied by the copy engine.

    GPU memory   | tokens |  --- one program --->  | pinned memory |   over PCIe

Between two steps a copy of four bytes costs 10 us: the GPU hands over to its copy engine, and the
next step waits until it has handed back. A kernel stays where it is. For many numbers the engine
would be right: it copies while kernels run.
"""

from __future__ import annotations

import torch

from m5_kernels.kernels.backend import ceil_div, runs_triton, tl, triton


def write_to_host(source: torch.Tensor, target: torch.Tensor) -> None:
    """`target.copy_(source)`, which does not wait.

    source: int32 `[n]`, contiguous; target: int32 `[n]`, in pinned memory if source is on a GPU.
    Torch does not know who writes: target must live until that is done.
    """
    if not runs_triton(source):
        write_to_host_torch(source, target)
        return
    block = 1024
    _write_to_host_kernel[(ceil_div(len(source), block),)](
        source, target, len(source), BLOCK=block, num_warps=4
    )


@triton.jit(do_not_specialize=["number"])
def _write_to_host_kernel(source, target, number, BLOCK: tl.constexpr):
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(source + index, mask=index < number)
    tl.store(target + index, values, mask=index < number)


def write_to_host_torch(source: torch.Tensor, target: torch.Tensor) -> None:
    """The specification of `write_to_host`."""
    target.copy_(source)
