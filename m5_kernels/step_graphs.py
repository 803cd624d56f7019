"""CUDA graphs of whole steps, one per shape ("bucket"), captured when first needed.

A replay launches the kernels as they were captured, with the same pointers and grid sizes, so
everything that changes from step to step must be read from memory: rows of state, block tables,
lengths, where single tokens end and chunks begin. Rows beyond the batch are inactive (row -1), and
tokens beyond the step have no slot: they read nothing and write nothing.

    a step                 128 rows with one token, 3 chunks with 400 tokens
    its bucket             256 rows, 640 tokens, at most 16 chunks
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .sampler import Needs

MAX_TOKENS = 3072
"""With more, the kernels take longer than Python needs to launch them: nothing is gained."""
MAX_CHUNKS = 16


class StepShape(NamedTuple):
    """What the launches of a step depend on. In a graph they are the most that it can take."""

    num_tokens: int
    num_rows: int
    num_decodes: int
    """Rows, the first ones, that may have one token."""
    num_chunks: int
    """Rows after them that may have more."""
    has_guesses: bool = False
    """Whether some of the first are guesses, places of the row before them."""


class StepGraphs:
    """Captures and replays `compute(shape, needs) -> tokens`.

    Args:
        step_rows: the tensor from which the steps read the rows' requests, `[max_num_seqs]`.
        max_tokens: most tokens of a step.
        max_guess_rows: most rows of a step with guesses, those included; 0: there is none.
    """

    def __init__(
        self,
        step_rows: torch.Tensor,
        max_tokens: int,
        compute: Callable[[StepShape, Needs], torch.Tensor],
        max_guess_rows: int = 0,
    ) -> None:
        most = len(step_rows)
        self.decode_rows = [n for n in (1, 2, 4, 8) if n < most] + [*range(16, most, 16), most]
        self.mixed_rows = [n for n in (16, 64, 128, 256, 512) if n < most] + [most]
        sizes = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, MAX_TOKENS)
        self.mixed_tokens = [n for n in sizes if n <= max_tokens]
        self.guess_rows = [n for n in self.decode_rows if 1 < n <= max_guess_rows]
        self.step_rows = step_rows
        self.compute = compute
        self._graphs: dict[tuple[StepShape, Needs], tuple[torch.cuda.CUDAGraph, torch.Tensor]] = {}
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None

    def bucket_for(self, shape: StepShape) -> StepShape | None:
        """The smallest bucket that holds such a step; None if it is to be launched as it is."""
        if not shape.num_chunks:
            num_rows = next(n for n in self.decode_rows if n >= shape.num_rows)
            return StepShape(num_rows, num_rows, num_rows, 0, shape.has_guesses)
        num_rows = next(n for n in self.mixed_rows if n >= shape.num_rows)
        wanted = max(shape.num_tokens, num_rows)
        num_tokens = next((n for n in self.mixed_tokens if n >= wanted), None)
        if num_tokens is None or shape.num_chunks > MAX_CHUNKS:
            return None
        return StepShape(num_tokens, num_rows, num_rows, MAX_CHUNKS)

    def replay(self, bucket: StepShape, needs: Needs) -> torch.Tensor:
        """Compute the step that the device has been told of; the next replay overwrites it."""
        key = (bucket, needs)
        if key not in self._graphs:
            self._graphs[key] = self._capture(*key)
        graph, tokens = self._graphs[key]
        graph.replay()
        return tokens

    @property
    def buckets(self) -> list[StepShape]:
        """All of them, the largest first."""
        decodes = [StepShape(num_rows, num_rows, num_rows, 0) for num_rows in self.decode_rows]
        decodes += [StepShape(n, n, n, 0, has_guesses=True) for n in self.guess_rows]
        mixed = [
            StepShape(num_tokens, num_rows, num_rows, MAX_CHUNKS)
            for num_rows in self.mixed_rows
            for num_tokens in self.mixed_tokens
            if num_rows <= num_tokens
        ]
        return sorted(decodes + mixed, reverse=True)

    def capture_all(self, needs: Needs) -> None:
        """Capture every bucket now, the largest first: the others fit into its memory."""
        for bucket in self.buckets:
            if (bucket, needs) not in self._graphs:
                self._graphs[bucket, needs] = self._capture(bucket, needs)

    def _capture(
        self, bucket: StepShape, needs: Needs
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a step, after a run without rows that compiles its kernels. No state changes."""
        rows = self.step_rows.clone()
        self.step_rows.fill_(-1)
        self.compute(bucket, needs)
        self.step_rows.copy_(rows)
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # A stream of its own: torch's default one belongs to the device that captured first. And
        # not `torch.cuda.graph`, which waits for the device and gives all spare memory back.
        self._stream = self._stream or torch.cuda.Stream(self.step_rows.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(*([self._pool] if self._pool else []))
            try:
                tokens = self.compute(bucket, needs)
            finally:
                graph.capture_end()
        here.wait_stream(self._stream)
        self._pool = self._pool or graph.pool()
        return graph, tokens
