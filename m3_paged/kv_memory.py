"""How much KV memory a GPU has room for: run the largest step once and see what is left."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from m2_batching.slot_cache import KVShape
from milestone_llm.engine.plan import ScheduledRequest
from milestone_llm.engine.request import Request
from milestone_llm.engine.sampling_params import SamplingParams

from .block_cache import BlockCache
from .config import EngineConfig
from .scheduler import PagedStepPlan


def free_tokens_after_profiling(
    model: PreTrainedModel,
    config: EngineConfig,
    max_model_len: int,
    run: Callable[[BlockCache, PagedStepPlan], object],
) -> int:
    """Tokens of KV that fit into `gpu_memory_utilization` of the GPU beside model and activations.

    Args:
        run: computes a plan over a cache, as the engine's runner will.

    Raises:
        ValueError: not even one request of `max_model_len` would fit.
    """
    gc.collect()  # engines that nobody uses any more, whose parts know each other
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan, num_blocks = _largest_step(config, max_model_len)
    run(BlockCache(model, num_blocks, config.block_size), plan)
    torch.cuda.synchronize()
    bytes_per_token = KVShape.of(model).bytes_per_token
    own_cache = num_blocks * config.block_size * bytes_per_token
    activations = torch.cuda.max_memory_allocated() - before - own_cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    usable = free - activations - (1 - config.gpu_memory_utilization) * total
    num_tokens = int(usable // bytes_per_token)
    if num_tokens < max_model_len:
        raise ValueError(
            f"gpu_memory_utilization={config.gpu_memory_utilization} leaves room for "
            f"{max(0, num_tokens)} tokens of KV ({bytes_per_token} bytes each), fewer than one "
            f"request of max_model_len={max_model_len}"
        )
    return num_tokens


def _largest_step(config: EngineConfig, max_model_len: int) -> tuple[PagedStepPlan, int]:
    """A step of `max_num_batched_tokens` prompt tokens, and the blocks that it needs."""
    plan, num_blocks, budget = PagedStepPlan(), 0, config.max_num_batched_tokens
    while budget > 0 and len(plan.rows) < config.max_num_seqs:
        num_tokens = min(budget, max_model_len)
        num_own_blocks = -(-num_tokens // config.block_size)
        blocks = list(range(num_blocks, num_blocks + num_own_blocks))
        request = Request(f"profile-{len(plan.rows)}", [0] * num_tokens, SamplingParams())
        plan.rows.append(ScheduledRequest(request, 0, num_tokens, blocks=blocks))
        num_blocks += num_own_blocks
        budget -= num_tokens
    return plan, num_blocks
