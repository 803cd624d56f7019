"""CUDA graphs of whole steps, one per shape ("bucket"), captured when first needed.

A replay launches the kernels as they were captured, with the same pointers and grid sizes, so
everything that changes from step to step must be read from memory: rows of state, block tables,
lengths, where single tokens end and chunks begin. Sequences beyond the batch have no row (-1), and
tokens beyond the step have no slot: they read nothing and write nothing.

    a step                 128 sequences with one token, 3 chunks with 400 tokens
    its bucket             256 sequences, 640 tokens, at most 16 chunks
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.frontend.garbage import nothing_collected

from .decoder.one_gpu import OneGPU
from .sampler import Needs

log = logging.getLogger(__name__)

MAX_TOKENS = 3072
"""With more, the kernels take longer than Python needs to launch them: nothing is gained."""
MAX_CHUNKS = 16


class StepShape(NamedTuple):
    """What the launches of a step depend on. In a graph they are the most that it can take."""

    num_tokens: int
    num_seqs: int
    num_decodes: int
    """Sequences, the first ones, that may have one token."""
    num_chunks: int
    """Sequences after them that may have more."""

    @classmethod
    def of(cls, rows: Sequence[ScheduledRequest]) -> StepShape:
        """Of a plan's rows."""
        num_chunks = sum(map(is_chunk, rows))
        num_tokens = sum(row.num_new_tokens for row in rows)
        return cls(num_tokens, len(rows), len(rows) - num_chunks, num_chunks)


def is_chunk(row: ScheduledRequest) -> bool:
    """Whether a row has more than one token."""
    return row.num_new_tokens > 1


class Buckets:
    """Shapes for which there are graphs.

    Args:
        max_num_seqs: most sequences of a step.
        max_tokens: most tokens of a step.
    """

    def __init__(self, max_num_seqs: int, max_tokens: int) -> None:
        most = max_num_seqs
        self.decode_seqs = decode_sizes(most)
        self.mixed_seqs = [n for n in (16, 64, 128, 256, 512) if n < most] + [most]
        sizes = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048, 2560, MAX_TOKENS)
        self.mixed_tokens = [n for n in sizes if n <= max_tokens]
        self.largest_step = StepShape(max_tokens, most, most, MAX_CHUNKS)

    def bucket_for(self, shape: StepShape) -> StepShape | None:
        """The smallest bucket that holds such a step; None if it is to be launched as it is."""
        if not shape.num_chunks:
            num_seqs = next(n for n in self.decode_seqs if n >= shape.num_seqs)
            return StepShape(num_seqs, num_seqs, num_seqs, 0)
        num_seqs = next(n for n in self.mixed_seqs if n >= shape.num_seqs)
        wanted = max(shape.num_tokens, num_seqs)
        num_tokens = next((n for n in self.mixed_tokens if n >= wanted), None)
        if num_tokens is None or shape.num_chunks > MAX_CHUNKS:
            return None
        return StepShape(num_tokens, num_seqs, num_seqs, MAX_CHUNKS)

    def all(self) -> list[StepShape]:
        """Every bucket, the largest first."""
        decodes = [StepShape(n, n, n, 0) for n in self.decode_seqs]
        mixed = [
            StepShape(num_tokens, num_seqs, num_seqs, MAX_CHUNKS)
            for num_seqs in self.mixed_seqs
            for num_tokens in self.mixed_tokens
            if num_seqs <= num_tokens
        ]
        return sorted(decodes + mixed, reverse=True)


def decode_sizes(most: int) -> list[int]:
    """Numbers of sequences of one token, up to `most`, for which there are graphs."""
    return [n for n in (1, 2, 4, 8) if n < most] + [*range(16, most, 16), most]


class GraphMemory:
    """What graphs share that are never replayed side by side: memory, and a stream to capture on.

    captured: all of them, and others that are never replayed. With the first that goes, PyTorch
    lets go of what the library needs for all that were captured on its stream (its issue 193402).
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self.stream: torch.cuda.Stream | None = None
        self.captured: list[torch.cuda.CUDAGraph] = []


class StepGraphs:
    """Captures and replays `compute(shape, needs) -> tokens`.

    Args:
        step_rows: the tensor from which the steps read the sequences' rows, `[max_num_seqs]`.
        gpus: who must agree that memory holds a graph.
        memory: that of other graphs of these rows, if there are any.
    """

    def __init__(
        self,
        step_rows: torch.Tensor,
        compute: Callable[[StepShape, Needs], torch.Tensor],
        gpus: OneGPU,
        memory: GraphMemory | None = None,
    ) -> None:
        self.step_rows, self.compute, self.gpus = step_rows, compute, gpus
        self.memory = memory or GraphMemory()
        self._graphs: dict[
            tuple[StepShape, Needs], tuple[torch.cuda.CUDAGraph, torch.Tensor] | None
        ] = {}
        """None: memory did not hold it, of this GPU or of another."""
        self._has_warned = False

    def replay(self, bucket: StepShape, needs: Needs) -> torch.Tensor:
        """Compute the step that the device has been told of; the next replay overwrites it.

        A bucket that has no graph, for want of memory, is launched kernel by kernel.
        """
        self.capture([bucket], needs)
        captured = self._graphs[bucket, needs]
        if captured is None:
            return self.compute(bucket, needs)
        graph, tokens = captured
        graph.replay()
        return tokens

    def compute_nothing(self, shape: StepShape, needs: Needs) -> None:
        """Compute a step of this shape without rows, if memory holds it. No state changes.

        Done with the largest step before anything is captured: torch keeps its memory, and gives
        none of it to a capture, so that steps without a graph find theirs however many there are.
        """
        rows = self.step_rows.clone()
        self.step_rows.fill_(-1)
        try:
            with self.gpus.lack_of_memory_suppressed():
                self.compute(shape, needs)
        finally:
            self.step_rows.copy_(rows)

    def capture(self, buckets: Sequence[StepShape], needs: Needs) -> None:
        """Capture those that have not been tried yet, and say which ones memory does not hold.

        The largest is to come first: the others fit into its memory.
        """
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
            if not self.gpus.smallest(captured is not None):  # all have it, or none
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
        graph, here, memory = torch.cuda.CUDAGraph(), torch.cuda.current_stream(), self.memory
        # A stream of its own: torch's default one belongs to the device that captured first. And
        # not `torch.cuda.graph`, which waits for the device and gives all spare memory back.
        memory.stream = memory.stream or torch.cuda.Stream(self.step_rows.device)
        memory.stream.wait_stream(here)
        # The collector rests: should it find an engine that nobody has any more, the end of that
        # one's graphs would break this capture. Other threads may do what they like.
        with torch.cuda.stream(memory.stream), nothing_collected():
            graph.capture_begin(memory.pool, capture_error_mode="thread_local")
            try:
                tokens = self.compute(bucket, needs)
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it knows less about the cause
                    graph.capture_end()
                if memory.captured:
                    memory.captured.append(graph)
                raise
            graph.capture_end()
        memory.captured.append(graph)
        here.wait_stream(memory.stream)
        memory.pool = memory.pool or graph.pool()
        return graph, tokens


def is_out_of_memory(error: RuntimeError) -> bool:
    """Torch's allocator says so by a class of its own, the driver and Triton in words alone."""
    return "out of memory" in str(error)
