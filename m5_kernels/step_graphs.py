"""CUDA graphs of whole steps, one per shape ("bucket"), captured when first needed.

A replay launches the kernels as they were captured, with the same pointers and grid sizes, so
everything that changes from step to step must be read from memory: rows of state, block tables,
lengths, where single tokens end and chunks begin. Rows beyond the batch are inactive (row -1), and
tokens beyond the step have no slot: they read nothing and write nothing.

    a step                 128 rows with one token, 3 chunks with 400 tokens
    its bucket             256 rows, 640 tokens, at most 16 chunks
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.frontend.garbage import nothing_collected

from .sampler import Needs

log = logging.getLogger(__name__)

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

    @classmethod
    def of(cls, rows: Sequence[ScheduledRequest]) -> StepShape:
        """Of a plan's rows."""
        num_chunks = sum(map(is_chunk, rows))
        num_tokens = sum(row.num_new_tokens for row in rows)
        num_rows = sum(row.num_sampled_tokens for row in rows)
        has_guesses = num_rows > len(rows)
        return cls(num_tokens, num_rows, num_rows - num_chunks, num_chunks, has_guesses)


def is_chunk(row: ScheduledRequest) -> bool:
    """Whether a row has more than one certain token."""
    return row.num_new_tokens > row.num_sampled_tokens


class StepGraphs:
    """Captures and replays `compute(shape, needs) -> tokens`.

    Args:
        step_rows: the tensor from which the steps read the rows' requests, `[max_num_seqs]`.
        max_tokens: most tokens of a step.
        max_guess_rows: most rows of a step with guesses, those included; 0: there is none.
        smallest: of several ranks, the smallest of their numbers; None: there is one rank.
    """

    def __init__(
        self,
        step_rows: torch.Tensor,
        max_tokens: int,
        compute: Callable[[StepShape, Needs], torch.Tensor],
        max_guess_rows: int = 0,
        smallest: Callable[[int], int] | None = None,
    ) -> None:
        most = len(step_rows)
        self.decode_rows = [n for n in (1, 2, 4, 8) if n < most] + [*range(16, most, 16), most]
        self.mixed_rows = [n for n in (16, 64, 128, 256, 512) if n < most] + [most]
        sizes = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, MAX_TOKENS)
        self.mixed_tokens = [n for n in sizes if n <= max_tokens]
        most_guesses = next(n for n in self.decode_rows if n >= max_guess_rows)
        self.guess_rows = [n for n in self.decode_rows if 1 < n <= most_guesses]
        self.step_rows, self.max_tokens = step_rows, max_tokens
        self.compute, self.smallest = compute, smallest
        self._graphs: dict[
            tuple[StepShape, Needs], tuple[torch.cuda.CUDAGraph, torch.Tensor] | None
        ] = {}
        """None: memory did not hold it, of this rank or of another."""
        self._captured: list[torch.cuda.CUDAGraph] = []
        """Those of `_graphs`, and others that are never replayed. With the first that goes, PyTorch
        lets go of what the library needs for all that were captured on its stream (its issue
        193402)."""
        self._has_warned = False
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
        """Compute the step that the device has been told of; the next replay overwrites it.

        A bucket that has no graph, for want of memory, is launched kernel by kernel.
        """
        self._capture_missing([bucket], needs)
        captured = self._graphs[bucket, needs]
        if captured is None:
            return self.compute(bucket, needs)
        graph, tokens = captured
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
        """Capture every bucket now, the largest first: the others fit into its memory.

        The largest step of all comes before. Torch keeps its memory, and gives none of it to a
        capture, so that steps without a graph find theirs however many graphs there are.
        """
        most = len(self.step_rows)
        with lack_of_memory_suppressed(is_alone=self.smallest is None):
            self._compute_nothing(StepShape(self.max_tokens, most, most, MAX_CHUNKS), needs)
        self._capture_missing(self.buckets, needs)

    def _capture_missing(self, buckets: Sequence[StepShape], needs: Needs) -> None:
        """Capture those that nobody has tried yet, and say which ones memory does not hold."""
        left_out = []
        for bucket in buckets:
            if (bucket, needs) in self._graphs:
                continue
            captured = None
            try:
                captured = self._capture(bucket, needs)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            # NCCL: what one rank captures of a sum over all ranks, all must have captured.
            if self.smallest is not None and not self.smallest(captured is not None):
                captured = None
            self._graphs[bucket, needs] = captured
            if captured is None:
                left_out.append(bucket)
        if left_out and not self._has_warned:
            self._has_warned = True  # or there would be a line for each kind of request
            sizes = ", ".join(map(str, sorted({bucket.num_tokens for bucket in left_out})))
            log.warning(
                f"GPU memory does not hold {len(left_out)} of {len(buckets)} CUDA graphs: such "
                f"steps, of {sizes} tokens, are launched kernel by kernel. Lower "
                "gpu_memory_utilization or kv_cache_tokens."
            )

    def _capture(
        self, bucket: StepShape, needs: Needs
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a step. Nothing is computed, and what its kernels need is loaded on the way."""
        graph, here = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        # A stream of its own: torch's default one belongs to the device that captured first. And
        # not `torch.cuda.graph`, which waits for the device and gives all spare memory back.
        self._stream = self._stream or torch.cuda.Stream(self.step_rows.device)
        self._stream.wait_stream(here)
        # The collector rests: should it find an engine that nobody has any more, the end of that
        # one's graphs would break this capture. Other threads may do what they like.
        with torch.cuda.stream(self._stream), nothing_collected():
            graph.capture_begin(self._pool, capture_error_mode="thread_local")
            try:
                tokens = self.compute(bucket, needs)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it knows less about the cause
                    graph.capture_end()
                if self._captured:
                    self._captured.append(graph)
                raise
            graph.capture_end()
        self._captured.append(graph)
        here.wait_stream(self._stream)
        self._pool = self._pool or graph.pool()
        return graph, tokens

    def _compute_nothing(self, shape: StepShape, needs: Needs) -> None:
        """Compute a step without rows. No state changes."""
        rows = self.step_rows.clone()
        self.step_rows.fill_(-1)
        try:
            self.compute(shape, needs)
        finally:
            self.step_rows.copy_(rows)


def lack_of_memory_suppressed(is_alone: bool) -> contextlib.AbstractContextManager[None]:
    """Within, a step may find too little memory, and is then not computed, unless there are ranks.

    The others would wait for this one's part of a sum, so this one ends, and they with it.
    """
    return contextlib.suppress(torch.OutOfMemoryError) if is_alone else contextlib.nullcontext()


def is_out_of_memory(error: RuntimeError) -> bool:
    """Torch's allocator says so by a class of its own, the driver and Triton in words alone."""
    return "out of memory" in str(error)
