"""The one place that decides whether a kernel or its torch twin runs.

A kernel runs on a GPU tensor, and on a CPU tensor when `TRITON_INTERPRET=1` was set before
triton was imported. Everywhere else - no GPU, or no triton at all, as on macOS - the launcher
hands over to its twin. Kernel files take `triton` and `tl` from here, so that they can be
imported, and read, where triton can't be installed.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import torch


class _Missing:
    """Stands where triton is not installed: replaces what it decorates, refuses to launch."""

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


_wants_twins = ContextVar("wants_twins", default=False)


def runs_triton(tensor: torch.Tensor) -> bool:
    """True if kernels run on this tensor, False if the torch twins do."""
    return HAS_TRITON and (tensor.is_cuda or INTERPRETED) and not _wants_twins.get()


@contextlib.contextmanager
def twins() -> Iterator[None]:
    """Within, this thread runs the torch twins: for work done once, on which no compiler waits."""
    token = _wants_twins.set(True)
    try:
        yield
    finally:
        _wants_twins.reset(token)


def runs_no_kernels(device: torch.device) -> bool:
    """True if no kernel can run there."""
    return device.type == "cpu" and not INTERPRETED


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Within, this thread's kernels are compiled where they would be launched: side by side, each
    in a thread. Other threads launch theirs.

    At the end all are on the GPU, ready to be launched. What they would have written is not.
    """
    device = torch.cuda.current_device()
    try:
        with (
            _Loaders(
                os.cpu_count(), initializer=torch.cuda.set_device, initargs=(device,)
            ) as threads,
            triton.AsyncCompileMode(threads),
        ):
            yield
    finally:
        active_mode.set(None)  # which Triton forgets where a kernel does not compile


if HAS_TRITON:
    from triton.runtime._async_compile import active_mode

    _launch = triton.JITFunction.__getitem__

    def _launch_or_compile(kernel: Any, grid: Any) -> Any:
        """`kernel[grid]`: what launches it, or within `compiling` compiles it."""
        if active_mode.get() is None:  # of this thread
            return _launch(kernel, grid)
        return functools.partial(kernel.run, grid=grid, warmup=True)

    triton.JITFunction.__getitem__ = _launch_or_compile


class _Loaders(ThreadPoolExecutor):
    """Threads that load what they have compiled, and compile the C code that launches it."""

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        def load() -> Any:
            kernel = compile_kernel()
            kernel.run  # noqa: B018 - a property, which the first launch would ask for
            return kernel

        return super().submit(load)


HAS_PTX = tl.constexpr(HAS_TRITON and not INTERPRETED and torch.version.hip is None)


@triton.jit
def fast_log2(x):
    """log2 of fp32 to about 2e-7, between 1/2 and 2 absolutely, else relatively.

    That is one instruction of NVIDIA's GPUs; `tl.log2` is two dozen, and a little more exact.
    """
    if HAS_PTX:
        return tl.extra.cuda.libdevice.fast_log2f(x)
    else:
        return tl.log2(x)


def next_power_of_2(number: int) -> int:
    """Smallest power of two >= number; tile shapes are powers of two in Triton."""
    return 1 << max(0, number - 1).bit_length()


def lanes_for(num_seqs: int) -> int:
    """Lanes of a program that looks at all sequences of a step: 16, 256 or a power of two above.

    A kernel is compiled for each number, and every request waits for the compiler.
    """
    return 16 if num_seqs <= 16 else max(256, next_power_of_2(num_seqs))


def ceil_div(numerator: int, denominator: int) -> int:
    """The quotient, rounded up."""
    return -(-numerator // denominator)


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 4 for the interpreter, to have something to share out."""
    if device.type != "cuda":
        return 4
    return torch.cuda.get_device_properties(device).multi_processor_count
