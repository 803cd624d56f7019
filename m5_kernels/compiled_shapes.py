"""Steps that between them launch every kernel that a request may need, so that all can be compiled.

Triton makes a kernel of its own for a number that is 1, or a multiple of 16, and for each constant
of a launch, such as the power of two above the number of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from .sampler import Needs
from .step_graphs import MAX_TOKENS, StepShape


def shapes_of_all_kernels(
    max_num_seqs: int, max_tokens: int, more_counts: Iterable[int] = ()
) -> Iterator[tuple[StepShape, Needs]]:
    """Shapes of steps, and what their requests need.

    Args:
        max_num_seqs: most sequences of a step.
        max_tokens: most tokens of a step.
        more_counts: numbers of tokens for which products have kernels of their own.
    """
    if max_tokens > MAX_TOKENS:  # the one that takes longest to compile comes first
        yield StepShape(MAX_TOKENS + 1, 1, 1, 1), Needs()
    for n in (1, 2, 3, 4, 8, 16, 17, 32, 64, 128, 256, 512, 1024, max_num_seqs, *more_counts):
        if n <= max_num_seqs:
            yield StepShape(n, n, n, 0), Needs()
    for n in (1, 16, 17):
        if n <= min(max_num_seqs, max_tokens):
            yield StepShape(min(max(n, 64), max_tokens), n, n, n), Needs()
    for n in (128, *more_counts):
        if n - 64 < max_tokens:
            yield StepShape(min(n, max_tokens), 1, 1, 1), Needs()
    for n in (1, 2, 16):
        for needs in (Needs(filters=True), Needs(penalties=True), Needs(True, True)):
            if n <= max_num_seqs:
                yield StepShape(n, n, n, 0), needs
