"""vLLM's side of a comparison: its own scheduler and KV manager, with a made-up model.

Needs vLLM's Python files and a few packages, and no GPU: `fetch` gets them. Nothing is replaced by
a stub. vLLM looks at the model's class in a process of its own, so the folders must be on
PYTHONPATH.
"""

from __future__ import annotations

import copy
import functools
import json
import tempfile
from collections import deque
from pathlib import Path
from typing import Any

import torch
import vllm
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from .steps import Device, Row, Step
from .traffic import STOP_TOKEN_IDS, Arrival, Limits, guesses

VERSION: str = vllm.__version__
MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 65536,
    "torch_dtype": "float32", "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@functools.cache
def base_config() -> VllmConfig:
    """Return a configuration of a tiny model on a CPU. It takes seconds, so it is made once."""
    init_none_hash(sha256)
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(MODEL))
    longest = {"max_model_len": 4096, "max_num_batched_tokens": 4096}
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=4096
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=4, is_encoder_decoder=False, async_scheduling=False, **longest
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
    )


def vllm_config(limits: Limits) -> VllmConfig:
    """Return the configuration for these limits: copies of `base_config`'s parts, changed."""
    config = copy.copy(base_config())
    for part in ("model_config", "scheduler_config", "cache_config"):
        setattr(config, part, copy.copy(getattr(config, part)))
    config.model_config.max_model_len = limits.max_model_len
    scheduler, cache = config.scheduler_config, config.cache_config
    scheduler.max_num_seqs = limits.max_num_seqs
    scheduler.max_num_batched_tokens = limits.max_num_batched_tokens
    scheduler.max_num_scheduled_tokens = None
    scheduler.long_prefill_token_threshold = limits.long_prefill_token_threshold
    scheduler.policy = limits.policy
    scheduler.enable_chunked_prefill = limits.enable_chunked_prefill
    scheduler.async_scheduling = limits.is_ahead
    cache.block_size = limits.block_size
    cache.enable_prefix_caching = limits.enable_prefix_caching
    cache.num_gpu_blocks = limits.num_blocks + 1
    if limits.num_speculative_tokens:
        config.speculative_config = _speculation(limits.num_speculative_tokens)
    return config


@functools.cache
def _speculation(num_tokens: int) -> SpeculativeConfig:
    base = base_config()
    return SpeculativeConfig(
        method="ngram",
        num_speculative_tokens=num_tokens,
        prompt_lookup_max=3,
        prompt_lookup_min=2,
        target_model_config=base.model_config,
        target_parallel_config=base.parallel_config,
    )


def kv_cache_config(block_size: int, num_blocks: int) -> KVCacheConfig:
    """Return the layout of a KV cache with one layer and `num_blocks` blocks, the null block
    included."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=2, head_size=16, dtype=torch.float32
    )
    group = KVCacheGroupSpec(["layer"], spec)
    return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[group])


def make_scheduler(limits: Limits, cls: type[Scheduler]) -> Scheduler:
    """Return a scheduler of vLLM."""
    config = vllm_config(limits)
    return cls(
        config,
        kv_cache_config(limits.block_size, limits.num_blocks + 1),
        StructuredOutputManager(config),
        block_size=limits.block_size,
        log_stats=False,
    )


def make_request(name: str, arrival: Arrival, number: int, limits: Limits) -> Request:
    """Return a request of vLLM. A completion is a request, so `n` is 1."""
    params = SamplingParams(
        temperature=0,
        max_tokens=arrival.max_tokens,
        ignore_eos=True,
        stop_token_ids=list(STOP_TOKEN_IDS),
        prompt_logprobs=1 if arrival.has_prompt_logprobs else None,
    )
    hasher = get_request_block_hasher(limits.block_size, sha256)
    return Request(
        request_id=name,
        prompt_token_ids=list(arrival.tokens),
        sampling_params=params,
        pooling_params=None,
        arrival_time=float(number),
        block_hasher=hasher if limits.enable_prefix_caching else None,
        priority=arrival.priority,
        cache_salt=arrival.salt or None,
    )


def model_output(tokens: dict[str, list[int]]) -> ModelRunnerOutput:
    """Return what a runner would: the tokens of each row, none for a chunk."""
    return ModelRunnerOutput(
        req_ids=list(tokens),
        req_id_to_index={name: index for index, name in enumerate(tokens)},
        sampled_token_ids=list(tokens.values()),
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
    )


class Recorded(Scheduler):
    """Notes in which order requests are preempted: vLLM's output has a set of them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.victims: list[str] = []

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        self.victims.append(request.request_id)
        super()._preempt_request(request, *args, **kwargs)


class VLLMRun:
    """vLLM's scheduler on some traffic, step by step, in the words of `M4Run`.

    Args:
        kind: the scheduler's class; steps ahead are vLLM's `AsyncScheduler` below it.
    """

    def __init__(self, limits: Limits, kind: type[Recorded] = Recorded) -> None:
        self.limits = limits
        base = AsyncScheduler if limits.is_ahead else Scheduler
        self.scheduler: Any = make_scheduler(limits, type("VLLMScheduler", (kind, base), {}))
        self.device = Device(limits.block_size)
        self.completions: dict[str, list[str]] = {}
        self._num_arrivals = 0
        self._in_flight: deque[tuple[Any, dict[str, list[int]]]] = deque()

    def add(self, arrival: Arrival) -> None:
        """Queue a request. vLLM makes a request of each completion."""
        names = [f"{arrival.name}/{index}" if index else arrival.name for index in range(arrival.n)]
        self.completions[arrival.name] = names
        for index, name in enumerate(names):
            self.device.add(name, arrival.tokens, index)
            request = make_request(name, arrival, self._num_arrivals, self.limits)
            self.scheduler.add_request(request)
            self._num_arrivals += 1

    def abort(self, name: str) -> None:
        """End a request, if it is there and has not ended."""
        for one in reversed(self.completions.get(name, [])):
            if one in self.scheduler.requests:
                self.scheduler.finish_requests(one, RequestStatus.FINISHED_ABORTED)

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""
        return bool(self.scheduler.has_unfinished_requests())

    def step(self) -> Step:
        """Plan a step, compute it, and settle it, or the one before."""
        scheduler = self.scheduler
        before = {request.request_id for request in scheduler.running}
        scheduler.victims = []
        plan = scheduler.schedule()
        requests = {name: scheduler.requests[name] for name in plan.num_scheduled_tokens}
        rows = [self._row(plan, name) for name in requests]
        new = [name for name in requests if name not in before or name in scheduler.victims]
        pool = scheduler.kv_cache_manager.block_pool
        step = Step(
            rows=rows,
            admitted=[name for name in new if not requests[name].num_preemptions],
            resumed=[name for name in new if requests[name].num_preemptions],
            preempted=list(scheduler.victims),
            num_used=pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
        )
        samples = {
            row.name: [row.name] if row.end - len(row.drafts) >= len(self.device.known[row.name])
            else [] for row in rows
        }  # fmt: skip
        sampled = self.device.run(rows, samples)
        self._in_flight.append((plan, {name: sampled.get(name, []) for name in requests}))
        while len(self._in_flight) > (int(self.limits.is_ahead) if rows else 0):
            step.finished += self._settle()
        step.running = [request.request_id for request in scheduler.running]
        step.waiting = [request.request_id for request in scheduler.waiting]
        return step

    def _row(self, plan: Any, name: str) -> Row:
        end = self.scheduler.requests[name].num_computed_tokens
        manager = self.scheduler.kv_cache_manager
        (table,) = manager.get_block_ids(name)
        drafts = list(plan.scheduled_spec_decode_tokens.get(name, ()))
        start = end - plan.num_scheduled_tokens[name]
        return Row(name, start, end, [block - 1 for block in table], drafts)

    def _settle(self) -> list[str]:
        """Hand the tokens of the oldest step to vLLM. Returns the requests that ended."""
        plan, tokens = self._in_flight.popleft()
        here = [name for name in tokens if name in self.scheduler.requests]
        self.scheduler.update_from_output(plan, model_output(tokens))
        if most := self.limits.num_speculative_tokens:
            known, seeds = self.device.known, self.device.seeds
            drafts = {n: guesses(known[n], seeds[n], most) for n, ids in tokens.items() if ids}
            ids = DraftTokenIds(list(drafts), list(drafts.values()))
            self.scheduler.update_draft_token_ids(ids)
        return [name for name in here if name not in self.scheduler.requests]
