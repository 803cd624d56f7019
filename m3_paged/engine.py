"""M3's engine: paged KV memory, and several completions of one prompt."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import m2_batching
from m2_batching.slot_cache import KVShape
from milestone_llm.engine.request import Request
from milestone_llm.engine.sampling_params import SamplingParams

from .block_cache import BlockCache
from .config import EngineConfig
from .kv_memory import free_tokens_after_profiling
from .runner import ModelRunner
from .scheduler import PagedStepPlan, Scheduler

SWAP_SPACE_BYTES = 4 * 2**30
"""Host memory for swapped KV at most, where nothing is configured: on CUDA it is pinned."""


class LLMEngine(m2_batching.LLMEngine):
    """Continuous batching over KV blocks."""

    milestone: ClassVar[str] = "m3_paged"
    config_class: ClassVar[type[m2_batching.EngineConfig]] = EngineConfig
    can_share_kv: ClassVar[bool] = True
    useful_kv: ClassVar[int] = 1
    """How often the KV of `max_num_seqs` full requests is worth having, where memory is plenty."""

    def build_scheduler(self) -> Scheduler:
        """Scheduling by blocks."""
        num_blocks = self._num_kv_blocks()
        return Scheduler(self.config, self.max_model_len, num_blocks)

    def build_runner(self) -> ModelRunner:
        """Paged attention."""
        scheduler = self.scheduler
        cache = BlockCache(
            self.model,
            scheduler.num_blocks,
            self.config.block_size,
            num_host_blocks=scheduler.host.pool.num_blocks,
        )
        return ModelRunner(self.model, cache)

    def _num_kv_blocks(self) -> int:
        """Blocks of KV memory. How much may be swapped to the host is settled with it."""
        config = self.config
        num_blocks = self._num_kv_tokens() // config.block_size
        if config.preemption == "swap" and config.swap_space_tokens is None:
            limit = SWAP_SPACE_BYTES // KVShape.of(self.model).bytes_per_token
            num_tokens = min(num_blocks * config.block_size, limit)
            self.config = replace(config, swap_space_tokens=num_tokens)
        return num_blocks

    def _num_kv_tokens(self) -> int:
        """Tokens of KV memory: as configured, or as many as can be of use, if a GPU has them."""
        if self.config.kv_cache_tokens is not None:
            return int(self.config.kv_cache_tokens)
        # Whole blocks a request, so that every request can grow to its full length.
        blocks_a_request = -(-self.max_model_len // self.config.block_size)
        num_tokens = int(self.config.max_num_seqs * blocks_a_request * self.config.block_size)
        if self.model.device.type != "cuda":
            return num_tokens
        free = free_tokens_after_profiling(
            self.model, self.config, self.max_model_len, self._run_once
        )
        return min(free, num_tokens * self.useful_kv)

    def _run_once(self, cache: BlockCache, plan: PagedStepPlan) -> None:
        """Compute a plan over some cache, to see how much memory that takes."""
        ModelRunner(self.model, cache).execute(plan)

    def _make_request(
        self, prompt: Any, params: SamplingParams, request_id: str | None, *args: Any
    ) -> Request:
        """A request and, for n > 1, its further completions, which fork from it later.

        Raises:
            ValueError: also where the id names a further completion of an unfinished request.
        """
        namesake = self.requests.get(str(request_id).rpartition("/")[0])
        if namesake and any(fork.request_id == request_id for fork in namesake.completions):
            raise ValueError(
                f"request_id {request_id!r} belongs to a completion of the unfinished request "
                f"{namesake.request_id!r}"
            )
        leader = super()._make_request(prompt, params, request_id, *args)
        for index in range(1, leader.sampling_params.n):
            fork_id = f"{leader.request_id}/{index}"
            while fork_id in self.requests:
                fork_id += "_"
            fork = Request(
                request_id=fork_id,
                prompt_token_ids=leader.prompt_token_ids,
                sampling_params=leader.sampling_params,
                arrival=leader.arrival,
                priority=leader.priority,
                seed=(leader.seed + index) % 2**64,
                eos_token_ids=leader.eos_token_ids,
                detokenizer=self._detokenizer(leader.sampling_params),
                leader=leader,
            )
            leader.completions.append(fork)
            leader.forks.append(fork)
        return leader

    def stats(self) -> dict[str, Any]:
        """As before, with preemptions, copies, and what blocks reserve beyond what they store."""
        stats = super().stats()
        kv = stats["kv"]
        size = self.config.block_size
        kv["bytes_per_token"] = KVShape.of(self.model).bytes_per_token
        kv["wasted_tokens"] = kv["reserved_tokens"] - kv["stored_tokens"]
        kv["wasted_tokens_by_request"] = {
            request.request_id: size * len(self.scheduler.kv.blocks_of(request.request_id))
            - request.num_computed_tokens
            for request in self.scheduler.running
        }
        stats["preemptions"] = self.scheduler.num_preemptions
        stats["copied_blocks"] = self.scheduler.kv.num_copies
        return stats
