"""CUDA graphs of whole steps, one per shape ("bucket"), captured when first needed.

A replay launches the kernels as they were captured, with the same pointers and grid sizes. So
everything that changes from step to step must be read from memory: rows of state, block tables,
lengths, the number of decode rows before the first chunk. Sequences beyond the batch have no row
(-1), and tokens beyond the step have no slot: they read nothing and write nothing.

    a step                 128 sequences with one token, 3 chunks with 400 tokens
    its bucket             256 sequences, 640 tokens, at most 16 chunks
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from milestone_llm.core.plan import ScheduledRequest

from .group import Group
from .kernels.cuda_graph import GraphMemory, is_out_of_memory
from .sampler import SamplingFeatures

log = logging.getLogger(__name__)

MAX_TOKENS = 3072
"""Larger steps gain nothing: their kernels take longer than Python needs to launch them."""
MAX_CHUNKS = 16


class StepShape(NamedTuple):
    """The numbers on which the launches of a step depend. For a graph they are its limits."""

    num_tokens: int
    num_seqs: int
    num_decodes: int
    """Number of sequences, the first ones, that may have one token."""
    num_chunks: int
    """Number of sequences, the last ones, that may have more than one token."""

    @classmethod
    def of(cls, rows: Sequence[ScheduledRequest]) -> StepShape:
        """Return the shape of a plan's rows."""
        num_chunks = sum(map(is_chunk, rows))
        num_tokens = sum(row.num_new_tokens for row in rows)
        return cls(num_tokens, len(rows), len(rows) - num_chunks, num_chunks)


def is_chunk(row: ScheduledRequest) -> bool:
    """Return whether a row has more than one token."""
    return row.num_new_tokens > 1


class Buckets:
    """The shapes for which there are graphs.

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
        """Return the smallest bucket that holds such a step. None: launch kernel by kernel."""
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
        """Return every bucket, the largest first."""
        decodes = [StepShape(n, n, n, 0) for n in self.decode_seqs]
        mixed = [
            StepShape(num_tokens, num_seqs, num_seqs, MAX_CHUNKS)
            for num_seqs in self.mixed_seqs
            for num_tokens in self.mixed_tokens
            if num_seqs <= num_tokens
        ]
        return sorted(decodes + mixed, reverse=True)


def decode_sizes(most: int) -> list[int]:
    """Return the batch sizes, up to `most`, for which there are graphs of decode steps."""
    return [n for n in (1, 2, 4, 8) if n < most] + [*range(16, most, 16), most]


class StepGraphs:
    """Capture and replay `compute(shape, features) -> tokens`.

    Args:
        step_rows: the tensor from which the steps read the sequences' rows, `[max_num_seqs]`.
        group: the processes that must agree that memory holds a graph.
        memory: memory of other graphs of these rows, if there are any.
        must: whether every step can be captured if memory holds it. If not, no capture is tried
            after one has failed.
    """

    def __init__(
        self,
        step_rows: torch.Tensor,
        compute: Callable[[StepShape, SamplingFeatures], torch.Tensor],
        group: Group,
        memory: GraphMemory | None = None,
        must: bool = True,
    ) -> None:
        self.step_rows, self.compute, self.group = step_rows, compute, group
        self.memory, self.must = memory or GraphMemory(), must
        self._graphs: dict[
            tuple[StepShape, SamplingFeatures], tuple[torch.cuda.CUDAGraph, torch.Tensor] | None
        ] = {}
        """None: memory did not hold the graph, on this GPU or on another of the group."""
        self._has_warned = False
        self.has_given_up = False
        """Whether a capture has failed: from then on nothing is captured."""

    def replay(self, bucket: StepShape, features: SamplingFeatures) -> torch.Tensor:
        """Compute the step that was sent to the device. The next replay overwrites the tokens.

        If memory does not hold a graph for this bucket, the step is launched kernel by kernel.
        """
        self.capture([bucket], features)
        captured = self._graphs.get((bucket, features))
        if captured is None:
            return self.compute(bucket, features)
        graph, tokens = captured
        graph.replay()
        return tokens

    def compute_nothing(self, shape: StepShape, features: SamplingFeatures) -> None:
        """Compute a step of this shape without rows, if memory holds it. No state changes.

        Call it with the largest step before anything is captured. Torch keeps that memory and gives
        none of it to a capture. So steps without a graph find memory, however many graphs there
        are.
        """
        rows = self.step_rows.clone()
        self.step_rows.fill_(-1)
        try:
            with self.group.oom_suppressed():
                self.compute(shape, features)
        finally:
            self.step_rows.copy_(rows)

    def capture(self, buckets: Sequence[StepShape], features: SamplingFeatures) -> None:
        """Capture the buckets that have not been tried yet, and warn about those that memory does
        not hold.

        The largest bucket must come first: the others fit into its memory.
        """
        left_out = []
        for bucket in buckets:
            if (bucket, features) in self._graphs or self.has_given_up:
                continue
            captured = None
            try:
                captured = self._capture(bucket, features)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    if self.must:
                        raise
                    self._give_up(error)
            if not self.group.smallest(captured is not None):  # all processes have it, or none
                captured = None
            self._graphs[bucket, features] = captured
            if captured is None:
                left_out.append(bucket)
        if left_out and not self._has_warned:
            self._has_warned = True  # or each combination of features would print a line
            sizes = ", ".join(map(str, sorted({bucket.num_tokens for bucket in left_out})))
            log.warning(
                f"GPU memory does not hold {len(left_out)} of {len(buckets)} CUDA graphs: such "
                f"steps, of {sizes} tokens, are launched kernel by kernel. Lower "
                "gpu_memory_utilization or kv_cache_tokens."
            )

    def _give_up(self, error: RuntimeError) -> None:
        self.has_given_up = self._has_warned = True
        reason = str(error).splitlines()[0]
        log.warning("Steps are launched kernel by kernel: no CUDA graph holds them (%s)", reason)

    def _capture(
        self, bucket: StepShape, features: SamplingFeatures
    ) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """Capture a step. Nothing is computed."""
        return self.memory.capture(lambda: self.compute(bucket, features))
