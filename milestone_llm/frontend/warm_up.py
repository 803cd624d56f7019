"""Requests before the first one. They do its share of work, and are in no count and no trace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from milestone_llm.core.sampling_params import SamplingParams

from .input_processor import InputProcessor
from .step_log import StepLog


def compute_unnoticed(
    log: StepLog,
    input_processor: InputProcessor,
    generate: Callable[[list[list[int]], SamplingParams], object],
    sizes: Sequence[int],
    block_size: int | None,
) -> None:
    """Generate two tokens for so many short prompts at a time, one size after the other."""
    prompt = [0] * min(2, input_processor.max_model_len - 1)
    # With prompt_logprobs it asks nothing of a prefix cache, which counts its queries, and no other
    # request has its salt.
    params = SamplingParams(
        max_tokens=2, ignore_eos=True, prompt_logprobs=0, cache_salt="of a warm-up"
    )
    if block_size is not None:
        # A request stores three tokens. So few that none is preempted, nor evicts what the first
        # has left in the cache.
        most = log.scheduler.kv_usage().total // -(-3 // block_size) - 1
        sizes = sorted({max(1, min(size, most)) for size in sizes})
    with _unnoticed(log, input_processor):
        for size in sizes:
            generate([prompt] * size, params)


@contextlib.contextmanager
def _unnoticed(log: StepLog, input_processor: InputProcessor) -> Iterator[None]:
    """Within, requests come and end without a change to counts, traces and later seeds."""
    counts, watchers = dict(log.counts), log.watchers
    num_arrivals = input_processor.num_arrivals
    log.watchers = []
    try:
        yield
    finally:
        log.watchers = watchers
        log.counts.update(counts)
        log.scheduler.watermark = 0
        input_processor.num_arrivals = num_arrivals  # seeds depend on it
