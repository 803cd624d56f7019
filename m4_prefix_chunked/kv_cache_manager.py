"""KV memory as the scheduler sees it: M3's blocks, and a prefix cache that knows what they hold.

    find, can_allocate, allocate    a request comes, or comes back
    append, fork                    it grows; completions of its prompt share its blocks
    cache                           its full blocks can be found from now on
    preempt, free, reset            it goes

Only this class knows what has to happen in which order: a request's blocks are made findable, then
they are freed, and then the cache lets go of the request.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from m3_paged.block_manager import BlockManager
from m3_paged.kv_usage import check_tables, kv_stats, paged_kv_usage
from m3_paged.preemption import Preempter
from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request, RequestStatus

from .caching_pool import CachingBlockPool
from .config import EngineConfig
from .prefix_cache import PrefixCache, PrefixHit


class KVCacheManager:
    """Gives requests blocks as they grow, first those that have the right content already."""

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self.events: list[KVEvent] = []
        self.pool = CachingBlockPool(num_blocks, self.events)
        self.blocks = BlockManager(self.pool, config.block_size, self.events)
        """Block tables on the device."""
        self.prefix_cache = PrefixCache(self.blocks, self.pool, config.enable_prefix_caching)
        self.preempter = Preempter(self.blocks, config.num_host_blocks(num_blocks))
        self._found: tuple[Request, PrefixHit] | None = None
        """The result of the last lookup, until blocks are given out or forgotten."""

    def __repr__(self) -> str:
        return f"<KVCacheManager {self.blocks.block_tables}, {self.blocks.pool}>"

    def begin_step(self) -> None:
        """Note that the blocks of the step before have been written."""
        self.prefix_cache.begin_step()
        self._found = None

    def find(self, request: Request) -> int:
        """Return how many tokens a waiting request need not compute: cached, or swapped out."""
        return self._hit(request).num_tokens

    def can_allocate(self, request: Request) -> bool:
        """Whether there is room for all known tokens, given what is cached of them."""
        return self.prefix_cache.can_allocate(request, self._hit(request))

    def describe(self, request: Request) -> str:
        """Return how much is wanted and how much there is, in words for people."""
        return self.blocks.describe(request.num_tokens)

    def allocate(self, request: Request, plan: StepPlan) -> int:
        """Give a request blocks for all its known tokens.

        Returns:
            How many of these tokens were found in the cache. They count as computed.
        """
        hit, self._found = self._hit(request), None
        if request.status is RequestStatus.SWAPPED:
            self.blocks.allocate(request.request_id, request.num_tokens)
            self.preempter.swap_in(request, plan)
            return 0
        plan.copies += self.prefix_cache.allocate(request, hit)
        request.num_computed_tokens = hit.num_tokens
        if not request.num_preemptions:
            request.num_cached_tokens = hit.num_tokens
        return hit.num_tokens

    def _hit(self, request: Request) -> PrefixHit:
        """Return the KV that a waiting request has: cached, or swapped out. Looked up once an
        admission."""
        if self._found is None or self._found[0] is not request:
            is_swapped = request.status is RequestStatus.SWAPPED
            swapped = PrefixHit([], request.num_computed_tokens)
            self._found = request, swapped if is_swapped else self.prefix_cache.find(request)
        return self._found[1]

    def blocks_of(self, request: Request) -> list[int]:
        """Return where the request's KV is: its block table."""
        return self.blocks.block_tables[request.request_id]

    def append(self, request: Request, plan: StepPlan, num_guesses: int = 0) -> bool:
        """Make room for a running request's next token, or for draft tokens after it, which have
        a row by then. The plan notes the copies for that.

        Returns:
            False, with nothing done, if too few blocks are free.
        """
        name, start, end = request.request_id, request.num_computed_tokens, request.num_tokens
        if num_guesses:  # a block that the row fills may be shared by now: it must not be copied
            start = end
        if not self.blocks.can_append(name, start, end + num_guesses):
            return False
        plan.copies += self.blocks.append(name, start, end + num_guesses)
        self._found = None
        return True

    def cache(self, request: Request, end: int) -> None:
        """Make findable the blocks that tokens `.. end - 1` fill: their step is planned."""
        self.prefix_cache.make_findable(request, end)

    def fork(self, parent: Request, child: Request) -> None:
        """Let a further completion of a prompt share the blocks of the one that computes it."""
        self.blocks.fork(parent.request_id, child.request_id)

    def preempt(self, victim: Request, plan: StepPlan, reason: str) -> None:
        """Take a running request's blocks; their content can still be found."""
        self.prefix_cache.make_findable(victim, victim.num_computed_tokens)
        self.preempter.preempt(victim, plan, reason)
        self.prefix_cache.release(victim)

    def free(self, request: Request) -> None:
        """Take back a request's blocks, on the device or in host memory, if it has any.

        Full blocks can still be found by their content, unless the request ended with an error.
        """
        if request.request_id in self.blocks.block_tables:
            if request.finish_reason == "error":
                self.prefix_cache.forget_blocks(request)
                self._found = None
            else:
                self.prefix_cache.make_findable(request, request.num_computed_tokens)
            self.blocks.free(request.request_id)
        self.prefix_cache.release(request)
        if request.request_id in self.preempter.host.block_tables:
            self.preempter.host.free(request.request_id)

    def reset(self) -> None:
        """Take back all blocks and forget their content, even if the bookkeeping is broken."""
        self.blocks.reset()
        self.prefix_cache.reset_requests()
        self.preempter.reset()
        self._found = None

    def reset_prefix_cache(self) -> bool:
        """Forget all cached KV. Returns False, with nothing done, while blocks are in use."""
        if self.blocks.block_tables or self.preempter.host.block_tables:
            return False
        self.pool.reset()
        self._found = None
        return True

    @property
    def num_used(self) -> int:
        """Blocks that requests own."""
        return self.pool.num_used

    def usage(self, running: Sequence[Request], watermark: int) -> KVUsage:
        """Return how full KV memory is, and how many free blocks can still be found."""
        return paged_kv_usage(self.blocks, running, watermark, self.pool.num_cached_free)

    def stats(self, running: Sequence[Request]) -> dict[str, object]:
        """Return M3's figures and those of the prefix cache."""
        figures = kv_stats(self.blocks, self.preempter, running)
        return {**figures, "prefix_cache": self.prefix_cache.stats()}

    def check(self, running: Sequence[Request], waiting: Iterable[Request]) -> None:
        """Assert that no block is lost and that tables belong to running or swapped requests."""
        self.pool.check_invariants()
        check_tables(self.blocks, self.preempter, running, waiting)
