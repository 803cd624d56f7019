"""The stream of an engine, and CUDA graphs of what is launched on it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

from milestone_llm.gc_control import gc_paused

Result = TypeVar("Result")


@contextlib.contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Launch what follows on a new stream. On a CPU nothing changes.

    All work of an engine goes there, loading included: once kernels have run on several streams of
    a process, those of a CUDA graph start late, each by some 0.1 us ("Two streams are slower than
    one", docs/measurements/m5_experts_engine.md). And nothing can be captured on torch's default
    stream.
    """
    here = current_stream(device)
    if here is None:
        yield
        return
    own = torch.cuda.Stream(device)
    own.wait_stream(here)
    with torch.cuda.stream(own):
        yield
    here.wait_stream(own)


def current_stream(device: torch.device | str) -> torch.cuda.Stream | None:
    """Return the current stream of a GPU; None for a CPU, as `torch.cuda.stream` takes it."""
    return torch.cuda.current_stream(device) if torch.device(device).type == "cuda" else None


class GraphMemory:
    """Memory of graphs that never run at the same time.

    captured: all captured graphs, and graphs whose capture failed. When the first graph of a stream
    is destroyed, PyTorch also frees what the library needs for all other graphs captured on that
    stream (its issue 193402). So none is freed alone.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.captured: list[torch.cuda.CUDAGraph] = []

    def capture(self, compute: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Return a graph of what `compute` launches, and what it returns. Nothing is computed.

        The current stream must not be the default one (`own_stream`). Kernels that are not loaded
        yet are loaded here.
        """
        # Not by `torch.cuda.graph`: it waits for the device and frees all spare memory.
        graph = torch.cuda.CUDAGraph()
        # Disable gc: if it collected a dead engine, destroying that engine's graphs would break
        # this capture. Calls of other threads do not break it ("thread_local").
        with gc_paused():
            graph.capture_begin(self.pool, capture_error_mode="thread_local")
            try:
                result = compute()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # this error says less about the cause
                    graph.capture_end()
                if self.captured:
                    self.captured.append(graph)
                raise
            graph.capture_end()
        self.captured.append(graph)
        self.pool = self.pool or graph.pool()
        return graph, result


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means that GPU memory is full.

    Torch's allocator raises a class of its own. The driver and Triton only say it in the message.
    """
    return "out of memory" in str(error)
