"""PDL: a kernel starts as soon as there is room, before the previous kernel has ended.

Normally a GPU starts a kernel when the previous one is done, and is idle between the two for some
microseconds. With programmatic dependent launch (PDL; NVIDIA, from Hopper on) a kernel starts while
the previous one still runs, and waits for it only where it calls `wait_for_previous`. So launching
the kernel, and what it does before that call, cost no time.

    NEVER   |== kernel 0 ==|    |== kernel 1 ==|    |== kernel 2 ==|
    LATE    |== kernel 0 ==|
             |.............|== kernel 1 ==|
                            |.............|== kernel 2 ==|
    EARLY   |== kernel 0 ==|
             |.............|== kernel 1 ==|
              |...........................|== kernel 2 ==|

Where there are dots a kernel loads weights, then waits. The `Launch` of a step says which of the
three it uses.
"""

from __future__ import annotations

import functools

import torch

from .triton_or_twin import HAS_TRITON, tl, triton

NEVER, LATE, EARLY = 0, 1, 2
"""When a kernel lets the next one start. See `wait_for_previous`."""


@functools.cache
def supports_pdl(device: torch.device) -> bool:
    """Return whether a GPU supports programmatic dependent launch."""
    return (
        HAS_TRITON
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


@triton.jit
def wait_for_previous(PDL: tl.constexpr = 1):
    """Wait until all that earlier kernels wrote can be read, and let the next kernel start.

    LATE: the next kernel may start once this one has waited. EARLY: the next kernel may start at
    once, may let the one after it start, and so on. So before this call, any number of earlier
    kernels may still run. Until then a kernel writes nothing, and reads only

    - what no kernel of a step writes: weights, tables of cosines;
    - what describes the step: positions, slots, lengths, block tables, sampling parameters. They
      were written before the kernel for the embedding, which only starts when all before it have
      ended.

    After this call all earlier kernels are done: the previous one is done, and it has itself waited
    for the one before it. It is enough that one program of a kernel waits: others that have nothing
    to do may return at once.
    """
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
