"""When a kernel may start: as soon as there is room, before the one before it has ended.

By itself a GPU starts a kernel when the one before is done, and between the two it rests for some
microseconds. With programmatic dependent launch (NVIDIA, from Hopper on) a kernel is started while
the one before still runs, and waits for it only where it calls `wait_for_previous`: launching it,
and what it does up to there, cost no time.

    one after the other   |== kernel 0 ==|    |== kernel 1 ==|    |== kernel 2 ==|
    LATE                  |== kernel 0 ==|
                                       |..|== kernel 1 ==|
                                                       |..|== kernel 2 ==|

Which of it a step does is said around its launches (`next_starts`), and launchers ask for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch

from .backend import HAS_TRITON, tl, triton

NEVER, LATE, EARLY = 0, 1, 2
"""When a kernel lets the next one start, see `wait_for_previous`."""

_when: ContextVar[int] = ContextVar("when the next kernel starts", default=NEVER)
"""Of this thread alone: another one may launch the kernels of another engine."""


@functools.cache
def supports_early_starts(device: torch.device) -> bool:
    """Whether a GPU knows programmatic dependent launch."""
    return (
        HAS_TRITON
        and device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


class Starts:
    """Which of it steps do: LATE, wherever a GPU can."""

    def __init__(self, device: torch.device) -> None:
        self.late = LATE if supports_early_starts(device) else NEVER

    def when(self, num_tokens: int, gate_up: Any) -> int:
        """For the products of so many tokens, in layers whose largest matrix is `gate_up`."""
        return self.late


@contextlib.contextmanager
def next_starts(when: int) -> Iterator[None]:
    """Within, kernels are launched such that each lets the next one start NEVER, LATE or EARLY."""
    before = _when.set(when)
    try:
        yield
    finally:
        _when.reset(before)


def launch_options(most: int = EARLY, waits_for_launch: bool = False) -> dict[str, Any]:
    """Keywords of a launch: the constant for `wait_for_previous`, and whether this kernel starts
    before the one before it ends. Without early starts no such keyword: other GPUs know none.

    Args:
        most: of LATE and EARLY, what the kernel knows.
        waits_for_launch: this one starts when all before it have ended.
    """
    when = min(_when.get(), most)
    return {"PDL": when, "launch_pdl": True} if when and not waits_for_launch else {"PDL": when}


@triton.jit
def wait_for_previous(PDL: tl.constexpr = 1):
    """Wait until all that earlier kernels wrote can be read, and let the next kernel start.

    LATE: it starts once this one has waited. EARLY: it starts at once, may let in the next but one,
    and so on: so before this call, any number of earlier kernels may still run. Until then a kernel
    writes nothing, and reads only

    - what no kernel of a step writes: weights, tables of cosines;
    - what describes the step: positions, slots, lengths, blocks, parameters of sampling. They were
      written before the kernel for the embedding, which does not start before those before it end.

    After this call all earlier kernels are done: the previous one is, and has waited itself. For
    that one program that waits is enough: others that have nothing to do may leave at once.
    """
    if PDL == 2:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL > 0:
        tl.extra.cuda.gdc_wait()
    if PDL == 1:
        tl.extra.cuda.gdc_launch_dependents()
