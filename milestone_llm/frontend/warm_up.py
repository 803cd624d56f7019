"""Warm-up requests: they do the work that a first request would wait for, and no count or trace
has them."""

from __future__ import annotations

from collections.abc import Sequence

from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams

from .engine_driver import EngineDriver


def warm_up(driver: EngineDriver, sizes: Sequence[int], block_size: int | None) -> None:
    """Compute batches of short prompts, one size after the other. Call it as a change of the
    engine.

    Args:
        sizes: how many prompts each batch has.
        block_size: tokens in a KV block, where KV memory has blocks.
    """
    core, scheduler = driver.core, driver.core.scheduler
    if block_size is not None:
        # A request stores three tokens. Take so few requests that none is preempted, nor evicts
        # what the first has left in the cache.
        most = scheduler.kv_usage().total // -(-3 // block_size) - 1
        sizes = sorted({max(1, min(size, most)) for size in sizes})
    # With prompt_logprobs a request asks nothing of a prefix cache, which counts its queries. And
    # no other request has this salt.
    params = SamplingParams(
        max_tokens=2, ignore_eos=True, prompt_logprobs=0, cache_salt="of a warm-up"
    )
    prompt = [0] * min(2, scheduler.max_model_len - 1)
    with driver.log.paused():
        for size in sizes:
            for number in range(size):
                request = Request(f"warm-up {number}", prompt, params, arrival=number)
                core.add_request(request)
                driver.peers.added([request])
            while scheduler.has_unfinished_requests():
                driver.step()
                driver.log.close_steps()
