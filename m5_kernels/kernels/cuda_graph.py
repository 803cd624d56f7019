"""Capture launches in a CUDA graph, on a stream of our own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from milestone_llm.gc_control import gc_paused

Result = TypeVar("Result")


class GraphMemory:
    """What graphs that never run at the same time share: memory, and a stream to capture on.

    captured: all captured graphs, and graphs whose capture failed. When the first graph of a stream
    is destroyed, PyTorch also frees what the library needs for all other graphs captured on that
    stream (its issue 193402). So none is freed alone.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.captured: list[torch.cuda.CUDAGraph] = []

    def capture(
        self, compute: Callable[[], Result], device: torch.device
    ) -> tuple[torch.cuda.CUDAGraph, Result]:
        """Return a graph of what `compute` launches, and what it returns. Nothing is computed.

        Kernels that are not loaded yet are loaded here.
        """
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # Capture on our own stream: torch's default one belongs to the device that captured first.
        # And without `torch.cuda.graph`, which waits for the device and frees all spare memory.
        self.stream = self.stream or torch.cuda.Stream(device)
        self.stream.wait_stream(here)
        # Disable gc: if it collected a dead engine, destroying that engine's graphs would break
        # this capture. Calls of other threads do not break it ("thread_local").
        with torch.cuda.stream(self.stream), gc_paused():
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
        here.wait_stream(self.stream)
        self.pool = self.pool or graph.pool()
        return graph, result


def is_out_of_memory(error: RuntimeError) -> bool:
    """Return whether an error means that GPU memory is full.

    Torch's allocator raises a class of its own. The driver and Triton only say it in the message.
    """
    return "out of memory" in str(error)
