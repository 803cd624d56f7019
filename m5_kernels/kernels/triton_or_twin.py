"""Triton, or a stand-in for it where it is not installed, as on macOS.

A kernel runs on a GPU tensor, and on a CPU tensor if `TRITON_INTERPRET=1` was set before triton was
imported. Otherwise its torch twin runs (`Launch.runs_triton`). Kernel files import `triton` and
`tl` from here, so that they can be imported, and read, without Triton.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch


class _Missing:
    """Takes the place of triton if it is not installed: decorates kernels, refuses to launch."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __getitem__(self, grid: Any) -> Any:
        raise RuntimeError("triton is not installed: call the *_torch twin")


try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:  # pragma: no cover - exercised in a subprocess by the tests
    triton = tl = _Missing()
    HAS_TRITON = False

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET", "0") == "1"


def runs_no_kernels(device: torch.device) -> bool:
    """Return whether no kernel can run on a device."""
    return device.type == "cpu" and not INTERPRETED


HAS_PTX = tl.constexpr(HAS_TRITON and not INTERPRETED and torch.version.hip is None)


@triton.jit
def fast_log2(x):
    """Return log2 of fp32 to about 2e-7: between 1/2 and 2 an absolute error, else a relative one.

    It is one instruction of NVIDIA's GPUs. `tl.log2` is two dozen, and a little more exact.
    """
    if HAS_PTX:
        return tl.extra.cuda.libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two >= number. Tile shapes are powers of two in Triton."""
    return 1 << max(0, number - 1).bit_length()


def lanes_for(num_seqs: int) -> int:
    """Return the lanes of a program that reads all sequences of a step: 16, 256 or a higher power
    of two.

    A kernel is compiled for each number, and every request waits for the compiler.
    """
    return 16 if num_seqs <= 16 else max(256, next_power_of_2(num_seqs))


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient, rounded up."""
    return -(-numerator // denominator)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of streaming multiprocessors; 4 for the interpreter, to test shares."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
