"""What tests of M4's scheduler share: requests with given tokens, and a scheduler with its device.

Schedulers run on the device of lists of `paged_helpers`: each step it writes the tokens of every
row and reads every context back through the block tables, so a hit on a wrong block is caught at
the very step. `prompt` writes prompts by blocks, so that what they share shows: with blocks of 4,
`prompt("AB", 2)` is the block A, the block B and two tokens of its own.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

from m3_paged.block_manager import BlockManager
from m4_prefix_chunked import EngineConfig
from m4_prefix_chunked.caching_pool import CachingBlockPool
from m4_prefix_chunked.prefix_cache import PrefixCache
from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.tiny_models import EOS_TOKEN_ID
from paged_helpers import (
    COMPLETIONS,
    VOCAB_SIZE,
    PagedDevice,
    completions,
    expected_tokens,
    plan_line,
    step,
)

BLOCK_SIZE = 4


def make_scheduler(
    num_blocks: int = 8,
    block_size: int = BLOCK_SIZE,
    max_model_len: int | None = None,
    **fields: Any,
) -> Scheduler:
    """A scheduler with M4's defaults over a pool that holds one request exactly, or more."""
    config = EngineConfig(**{"max_num_seqs": 4, "block_size": block_size, **fields})
    return Scheduler(config, max_model_len or num_blocks * block_size, num_blocks)


def make_cache(
    num_blocks: int, block_size: int = BLOCK_SIZE, *, is_enabled: bool = True
) -> PrefixCache:
    """A prefix cache over tables (`cache.kv`) and a pool (`cache.pool`) of its own."""
    pool = CachingBlockPool(num_blocks, events=[])
    kv = BlockManager(pool, block_size, pool.events)
    return PrefixCache(kv, pool, is_enabled)


def prompt(
    blocks: str, num_own: int = 0, *, block_size: int = BLOCK_SIZE, own: str = ""
) -> list[int]:
    """A prompt of named blocks and `num_own` further tokens that nobody else has.

    Args:
        own: a name for the further tokens; those of equal names are equal.
    """
    words = [f"{name}:{i}" for name in blocks for i in range(block_size)]
    words += [f"{blocks}/{own}:{i}" for i in range(num_own)]
    return [zlib.crc32(word.encode()) % VOCAB_SIZE for word in words]


def request_of(
    name: str,
    token_ids: list[int],
    max_tokens: int = 1,
    *,
    n: int = 1,
    seed: int = 0,
    salt: str = "",
    ignore_eos: bool = True,
    **fields: Any,
) -> Request:
    """A request with this prompt, and its further completions, as the engine makes them."""
    params = SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=ignore_eos, cache_salt=salt)
    fields["eos_token_ids"] = frozenset({EOS_TOKEN_ID})
    leader = Request(name, list(token_ids), params, seed=seed, **fields)
    COMPLETIONS[leader] = further = [leader]
    for index in range(1, n):
        fork = Request(
            f"{name}/{index}",
            leader.prompt_token_ids,
            params,
            seed=seed + index,
            index=index,
            **fields,
        )
        further.append(fork)
    return leader


class Life:
    """A scheduler, its device and its clock: arrivals get their number, steps become lines."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        self.scheduler = make_scheduler(*args, **fields)
        self.device = PagedDevice(self.scheduler)
        self.num_arrivals = 0

    @property
    def kv(self) -> BlockManager:
        """The block tables."""
        return self.scheduler.kv

    @property
    def cache(self) -> PrefixCache:
        """The prefix cache."""
        return self.scheduler.prefix_cache

    @property
    def counts(self) -> dict[str, float]:
        """What the prefix cache has counted, evictions included."""
        return self.cache.stats()

    def add(self, *requests: Request) -> None:
        """Queue requests in the order of their arrival."""
        for request in requests:
            for completion in completions(request):
                completion.arrival = self.num_arrivals
            self.num_arrivals += 1
            self.scheduler.validate(request)
            self.scheduler.add(*completions(request))

    def plan(self) -> StepPlan:
        """Compute one step."""
        return step(self.scheduler, self.device)

    def line(self) -> str:
        """Compute one step and write it as `plan_line`."""
        return plan_line(self.plan())

    def run(self, *requests: Request) -> list[str]:
        """Add requests and compute all there is; every request gets the tokens it is due."""
        self.add(*requests)
        lines = []
        while self.scheduler.has_unfinished_requests():
            lines.append(self.line())
        for request in requests:
            assert_tokens(completions(request))
        return lines

    def fail(self) -> StepPlan:
        """Plan a step whose forward raises half way."""
        plan = self.scheduler.schedule()
        self.device.reset()
        self.scheduler.fail(plan)
        self.scheduler.check_invariants()
        return plan

    def abort(self, leader: Request) -> None:
        """End a request as the engine does: forks before what they fork from."""
        for completion in reversed(completions(leader)):
            if not completion.is_finished:
                self.scheduler.finish(completion, "abort")
        self.scheduler.check_invariants()


def assert_tokens(requests: Iterable[Request]) -> None:
    """Assert that requests that ran to their end got what they would have got alone."""
    for request in requests:
        assert request.finish_reason == "length", request.request_id
        assert request.output_token_ids == expected_tokens(request, request.num_output_tokens)
