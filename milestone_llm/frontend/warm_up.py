"""Requests before the first one. They do its share of work, and are in no count and no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from milestone_llm.core.sampling_params import SamplingParams

from .guarded_core import GuardedCore
from .input_processor import InputProcessor


def compute_unnoticed(
    core: GuardedCore,
    input_processor: InputProcessor,
    generate: Callable[[list[list[int]], SamplingParams], object],
    sizes: Sequence[int],
    block_size: int | None,
) -> None:
    """Generate two tokens for so many short prompts at a time, one size after the other."""
    prompt = [0] * min(2, input_processor.max_model_len - 1)
    # With prompt_logprobs it asks nothing of a prefix cache, which counts its queries, and nobody
    # else has its salt.
    params = SamplingParams(
        max_tokens=2, ignore_eos=True, prompt_logprobs=0, cache_salt="of a warm-up"
    )
    if block_size is not None:
        # A request stores three tokens. So few that none is preempted, nor evicts what the first
        # has left in the cache.
        most = core.scheduler.kv_usage().total // -(-3 // block_size) - 1
        sizes = sorted({max(1, min(size, most)) for size in sizes})
    with _unnoticed(core, input_processor):
        for size in sizes:
            generate([prompt] * size, params)


@contextlib.contextmanager
def _unnoticed(core: GuardedCore, input_processor: InputProcessor) -> Iterator[None]:
    """Within, requests come and end without a change to counts, traces and later seeds."""
    counts, watchers = dict(core.counts), core.watchers
    num_arrivals = input_processor.num_arrivals
    core.watchers = []
    try:
        yield
    finally:
        core.watchers = watchers
        core.counts.update(counts)
        core.scheduler.watermark = 0
        input_processor.num_arrivals = num_arrivals  # seeds depend on it
