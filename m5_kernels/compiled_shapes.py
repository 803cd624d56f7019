"""Step shapes that together launch every kernel a request may need, so that all can be compiled.

Triton compiles a kernel anew for an argument that is 1 or a multiple of 16, and for each constant
of a launch, such as the power of two above the number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .sampler import SamplingFeatures
from .step_graphs import MAX_TOKENS, StepShape


def shapes_of_all_kernels(
    max_num_seqs: int, max_tokens: int, more_counts: Iterable[int] = ()
) -> Iterator[tuple[StepShape, SamplingFeatures]]:
    """Yield step shapes, and the features that their requests use.

    Args:
        max_num_seqs: most sequences of a step.
        max_tokens: most tokens of a step.
        more_counts: numbers of tokens for which linear layers have kernels of their own.
    """
    if max_tokens > MAX_TOKENS:  # the shape that takes longest to compile comes first
        yield StepShape(MAX_TOKENS + 1, 1, 1, 1), SamplingFeatures()
    for n in (1, 2, 3, 4, 8, 16, 17, 32, 64, 128, 256, 512, 1024, max_num_seqs, *more_counts):
        if n <= max_num_seqs:
            yield StepShape(n, n, n, 0), SamplingFeatures()
    for n in (1, 16, 17):
        if n <= min(max_num_seqs, max_tokens):
            yield StepShape(min(max(n, 64), max_tokens), n, n, n), SamplingFeatures()
    for n in (128, *more_counts):
        if n - 64 < max_tokens:
            yield StepShape(min(n, max_tokens), 1, 1, 1), SamplingFeatures()
    for n in (1, 2, 16):
        for features in (
            SamplingFeatures(filters=True),
            SamplingFeatures(penalties=True),
            SamplingFeatures(True, True),
        ):
            if n <= max_num_seqs:
                yield StepShape(n, n, n, 0), features
