"""How kernels are launched. Each step has one `Launch`, and passes it to every launcher.

    Launch.on(device)     runs kernels, and lets each start early where the GPU can (`pdl`)
    only_compiles=True    compiles them, before the first request comes; nothing is computed
    uses_twins=True       computes with the torch twins instead

A launcher asks it whether to run the kernel or its twin, and how to launch, with which options.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from .pdl import EARLY, LATE, NEVER, supports_pdl
from .triton_or_twin import HAS_TRITON, INTERPRETED, triton

if HAS_TRITON:
    from triton.runtime._async_compile import active_mode


@dataclass(frozen=True)
class Launch:
    """How kernels are launched. A step passes it to every launcher."""

    pdl: int = NEVER
    """When a kernel lets the next one start: NEVER before its own end, LATE or EARLY."""
    only_compiles: bool = False
    """Compile the kernel, inside `compiling`, and do not run it."""
    uses_twins: bool = False
    """Run the torch twins. For work that is done once, and should not wait for a compiler."""

    @classmethod
    def on(cls, device: torch.device) -> Launch:
        """Return how steps on a device are launched: LATE on a GPU with PDL, else NEVER."""
        return cls(LATE if supports_pdl(device) else NEVER)

    def runs_triton(self, tensor: torch.Tensor) -> bool:
        """Return whether kernels run on this tensor. If not, their torch twins do."""
        return HAS_TRITON and (tensor.is_cuda or INTERPRETED) and not self.uses_twins

    def kernel(self, kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        """Return a function that launches a kernel with its arguments, or only compiles it."""
        if self.only_compiles:
            return functools.partial(kernel.run, grid=grid, warmup=True)
        launcher: Callable[..., Any] = kernel[grid]
        return launcher

    def pdl_options(self, most: int = EARLY, waits_for_launch: bool = False) -> dict[str, Any]:
        """Return keywords of a launch.

        They are the constant for `wait_for_previous`, and whether this kernel starts before the
        previous one ends. GPUs without PDL do not know the second.

        Args:
            most: LATE or EARLY, the most that the kernel supports.
            waits_for_launch: this kernel only starts when all before it have ended.
        """
        pdl = min(self.pdl, most)
        return {"PDL": pdl, "launch_pdl": True} if pdl and not waits_for_launch else {"PDL": pdl}


PLAIN = Launch()
"""The default of a launcher: one kernel after the other."""


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Compile in parallel, each in a thread, what is launched inside with `only_compiles`.

    At the end all kernels are on the GPU, ready to be launched. Other threads compile as usual.
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
        active_mode.set(None)  # Triton forgets this if a kernel does not compile


class _Loaders(ThreadPoolExecutor):
    """Threads that load the kernels they compiled, and compile the C code to launch them."""

    def submit(self, compile_kernel: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        def load() -> Any:
            kernel = compile_kernel()
            kernel.run  # noqa: B018 - a property: it loads the kernel, as the first launch would
            return kernel

        return super().submit(load)
