"""How much KV memory an engine gets: as configured, or as much as is useful and fits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from milestone_llm.core.errors import InputError
from milestone_llm.core.plan import ScheduledRequest, StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.kv_shape import KVShape
from milestone_llm.models.machine import check_memory, host_memory

from .block_cache import BlockCache
from .config import EngineConfig

SWAP_SPACE_BYTES = 4 * 2**30
"""Most host memory for swapped KV, where nothing is configured: on CUDA it is pinned. The default
is also at most a quarter of the host's memory."""

CPU_KV_BYTES = 4 * 2**30
"""Most KV memory on a CPU, where nothing is configured; or as much as one request needs, if that is
more. The default is also at most half of the host's memory."""

BYTES_OF_A_BLOCK = 256
"""Bytes of host memory that the bookkeeping of a block takes."""

AnyConfig = TypeVar("AnyConfig", bound=EngineConfig)
RunOnce = Callable[[BlockCache, StepPlan], object]
"""Computes a plan over a cache, as the engine's runner will."""


def fit_kv_memory(
    model: PreTrainedModel,
    config: EngineConfig,
    max_model_len: int,
    run_once: RunOnce,
    useful_kv: int = 1,
    num_blocks_for: Callable[[int], int] | None = None,
) -> tuple[int, int]:
    """Return the blocks of KV memory: as configured, or as many as are useful and fit.

    Args:
        max_model_len: as configured, or else the model's own.
        useful_kv: how many times the KV of `max_num_seqs` full requests is worth having.
        num_blocks_for: returns how many blocks a request of so many tokens takes; None: as many as
            its tokens fill.

    Returns:
        The number of blocks; and `max_model_len`, which is less where it was not configured and
        memory holds no request of that length.

    Raises:
        InputError: not even one request of the configured `max_model_len` would fit, or more is
            configured than there is.
    """
    size, num_blocks_for = config.block_size, num_blocks_for or config.num_blocks_for
    if config.kv_cache_tokens is not None:
        num_blocks = config.kv_cache_tokens // size
    else:
        least = size if config.max_model_len is None else num_blocks_for(max_model_len) * size
        num_tokens = _num_free_tokens(model, config, max_model_len, least, run_once)
        if model.device.type == "cpu" and config.max_model_len is not None:
            num_tokens = max(num_tokens, least)
        # Whole blocks a request, so that every request can grow to its full length.
        num_useful = config.max_num_seqs * num_blocks_for(max_model_len)
        if model.device.type == "cuda":
            num_useful *= useful_kv
        num_blocks = min(num_tokens // size, num_useful)
    _check_kv_memory(model, config, num_blocks)
    return num_blocks, config.length_that_fits(max_model_len, num_blocks, num_blocks_for)


def _check_kv_memory(model: PreTrainedModel, config: EngineConfig, num_blocks: int) -> None:
    """Refuse blocks, swap space and their bookkeeping if memory does not hold them.

    Raises:
        InputError: memory does not hold them.
    """
    bytes_per_token, host = KVShape.of(model, config.kv_dtype).bytes_per_token, torch.device("cpu")
    each, size = f"tokens ({bytes_per_token} bytes each)", config.block_size
    what = f"KV memory of {num_blocks} blocks of block_size={size} {each}"
    advice = "lower kv_cache_tokens, block_size or max_model_len"
    kv_bytes = num_blocks * size * bytes_per_token
    check_memory(kv_bytes, model.device, what, advice)
    swap_tokens = (config.swap_space_tokens or 0) if config.preemption == "swap" else 0
    what = f"swap_space_tokens={swap_tokens} {each}"
    on_host = swap_tokens * bytes_per_token + (kv_bytes if model.device.type == "cpu" else 0)
    if swap_tokens:
        check_memory(on_host, host, f"KV memory with {what}", "lower swap_space_tokens")
    books = BYTES_OF_A_BLOCK * (num_blocks + swap_tokens // size)
    what = f"KV memory with the books of {num_blocks + swap_tokens // size} blocks"
    check_memory(on_host + books, host, what, "raise block_size or lower kv_cache_tokens")


def _num_free_tokens(
    model: PreTrainedModel, config: EngineConfig, max_model_len: int, least: int, run_once: RunOnce
) -> int:
    if model.device.type != "cuda":
        return (
            min(CPU_KV_BYTES, host_memory() // 2)
            // KVShape.of(model, config.kv_dtype).bytes_per_token
        )
    with torch.cuda.device(model.device):
        return _free_tokens_after_profiling(model, config, max_model_len, least, run_once)


def with_swap_space(config: AnyConfig, model: PreTrainedModel, num_blocks: int) -> AnyConfig:
    """Return the configuration with swap space filled in, if it was open: as much as the device's
    KV, at most 4 GiB."""
    if config.preemption != "swap" or config.swap_space_tokens is not None:
        return config
    limit = (
        min(SWAP_SPACE_BYTES, host_memory() // 4)
        // KVShape.of(model, config.kv_dtype).bytes_per_token
    )
    return replace(config, swap_space_tokens=min(num_blocks * config.block_size, limit))


def _free_tokens_after_profiling(
    model: PreTrainedModel,
    config: EngineConfig,
    max_model_len: int,
    least: int,
    run_once: RunOnce,
) -> int:
    """Return the tokens of KV that fit into `gpu_memory_utilization` of the GPU, after model and
    activations.

    Args:
        least: tokens of KV that one request takes.
        run_once: computes a plan over a cache, as the engine's runner will.

    Raises:
        InputError: not even one request would fit, or a step does not.
    """
    most = min(config.max_num_batched_tokens, config.max_num_seqs * max_model_len)
    _check_kv_memory(model, config, -(-most // config.block_size))
    gc.collect()  # objects that only a reference cycle keeps
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    plan, num_blocks = _largest_step(config, max_model_len)
    run_once(BlockCache(model, num_blocks, config.block_size, dtype=config.kv_dtype), plan)
    torch.cuda.synchronize()
    bytes_per_token = KVShape.of(model, config.kv_dtype).bytes_per_token
    own_cache = num_blocks * config.block_size * bytes_per_token
    activations = torch.cuda.max_memory_allocated() - before - own_cache
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    usable = free - activations - (1 - config.gpu_memory_utilization) * total
    num_tokens = int(usable // bytes_per_token)
    if num_tokens < least:
        raise InputError(
            f"gpu_memory_utilization={config.gpu_memory_utilization} leaves room for "
            f"{max(0, num_tokens)} tokens of KV ({bytes_per_token} bytes each), fewer than one "
            f"request of {config.max_model_len or config.block_size} tokens takes"
        )
    return num_tokens


def _largest_step(config: EngineConfig, max_model_len: int) -> tuple[StepPlan, int]:
    """Return a step of `max_num_batched_tokens` prompt tokens, and the blocks that it needs."""
    plan, num_blocks, budget = StepPlan(), 0, config.max_num_batched_tokens
    while budget > 0 and len(plan.rows) < config.max_num_seqs:
        num_tokens = min(budget, max_model_len)
        num_own_blocks = -(-num_tokens // config.block_size)
        blocks = list(range(num_blocks, num_blocks + num_own_blocks))
        request = Request(f"profile-{len(plan.rows)}", [0] * num_tokens, SamplingParams())
        plan.rows.append(ScheduledRequest(request, 0, num_tokens, blocks=blocks))
        num_blocks += num_own_blocks
        budget -= num_tokens
    return plan, num_blocks
