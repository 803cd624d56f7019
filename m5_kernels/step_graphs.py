"""CUDA graphs of whole decode steps, one per batch size ("bucket"), captured when first needed.

A replay launches the kernels as they were captured, with the same pointers and grid sizes, so
everything that changes from step to step must be read from memory: rows of state, block tables,
lengths. Rows beyond the batch are inactive (row -1): they read nothing and write nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .sampler import Needs


class DecodeGraphs:
    """Captures and replays `decode(num_rows, needs) -> tokens`.

    Args:
        step_rows: the tensor from which the steps read the rows' requests, `[max_num_seqs]`.
    """

    def __init__(
        self, step_rows: torch.Tensor, decode: Callable[[int, Needs], torch.Tensor]
    ) -> None:
        max_num_seqs = len(step_rows)
        small = [size for size in (1, 2, 4, 8) if size < max_num_seqs]
        self.buckets = [*small, *range(16, max_num_seqs, 16), max_num_seqs]
        self.step_rows = step_rows
        self.decode = decode
        self._graphs: dict[tuple[int, Needs], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def bucket_for(self, num_rows: int) -> int:
        """The smallest bucket that holds `num_rows`."""
        return next(bucket for bucket in self.buckets if bucket >= num_rows)

    def replay(self, num_rows: int, needs: Needs) -> torch.Tensor:
        """Decode one token a row; the result is overwritten by the next replay."""
        key = (self.bucket_for(num_rows), needs)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, tokens = self._graphs[key]
        graph.replay()
        return tokens

    def capture_all(self, needs: Needs) -> None:
        """Capture every bucket now, the largest first: the others fit into its memory."""
        for bucket in reversed(self.buckets):
            if (bucket, needs) not in self._graphs:
                self._graphs[bucket, needs] = self._capture(bucket, needs)

    def _capture(self, bucket: int, needs: Needs) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a step, after a run without rows that compiles its kernels. No state changes."""
        rows = self.step_rows.clone()
        self.step_rows.fill_(-1)
        self.decode(bucket, needs)
        self.step_rows.copy_(rows)
        graph = torch.cuda.CUDAGraph()
        # A stream of its own: torch's default one belongs to the device that captured first.
        self._stream = self._stream or torch.cuda.Stream(self.step_rows.device)
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            tokens = self.decode(bucket, needs)
        self._pool = self._pool or graph.pool()
        return graph, tokens
