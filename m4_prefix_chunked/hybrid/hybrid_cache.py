"""A prefix that all groups of layers have, and M4's KV manager with tables by group.

    tokens                    0..3   4..7   8..11  12..15 |          block_size 4, window 5
    group 0, sees all         [ A      B      C      D  ]            needs all of them
    group 1, sees 5           [ -      -      C      D  ]            needs 12..15 and token 11

A hit of n tokens needs the blocks of all n in groups that see all. In a group with a window it
needs the last ones: token n sees no others. If one of these was evicted, the hit is shorter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from m3_paged.preemption import Preempter
from m4_prefix_chunked.caching_pool import CachingBlockPool
from m4_prefix_chunked.config import EngineConfig
from m4_prefix_chunked.kv_cache_manager import KVCacheManager
from m4_prefix_chunked.prefix_cache import PrefixCache, PrefixHit
from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.errors import InputError
from milestone_llm.core.kv import NULL_BLOCK, BlockTables, KVEvent, KVUsage, tables_of
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request, RequestStatus

from .group_blocks import GroupedBlocks
from .layer_groups import LayerGroups, longest_reach


class HybridPrefixCache(PrefixCache):
    """Finds blocks by their group and content.

    Args:
        kv: block tables of all groups; its pool is `pool`.
    """

    def __init__(self, kv: GroupedBlocks, pool: CachingBlockPool, is_enabled: bool) -> None:
        super().__init__(kv, pool, is_enabled)
        self.groups = kv.groups
        self.grouped = kv

    def find(self, request: Request) -> PrefixHit:
        """Return the longest prefix of a request's known tokens that all groups have."""
        size, num_known = self.kv.block_size, len(request.token_ids)
        num_blocks = num_known // size if self._is_asked(request) else 0
        for group, manager in enumerate(self.groups):
            if manager.window is None:
                found = (i for i in range(num_blocks) if self._block(request, group, i) is None)
                num_blocks = next(found, num_blocks)
        while num_blocks:
            num_tokens = min(num_blocks * size, num_known - 1)
            missing = self._missing(request, num_blocks, num_tokens)
            if missing is None:
                return self._hit(request, num_blocks, num_tokens)
            num_blocks = missing
        return self._hit(request, 0, 0)

    def _missing(self, request: Request, num_blocks: int, num_tokens: int) -> int | None:
        """Return the last entry that a hit lacks in a group with a window. An entry that is copied
        before it is written is missing, too."""
        firsts = [
            num_blocks - 1 if manager.window is None else manager.first_needed(num_tokens)
            for manager in self.groups
        ]
        for index in range(num_blocks - 1, min(firsts) - 1, -1):
            is_copied = index == num_tokens // self.kv.block_size
            for group, first in enumerate(firsts):
                block = self._block(request, group, index) if index >= first else NULL_BLOCK
                if block is None or (is_copied and block in self.pending):
                    return index
        return None

    def _hit(self, request: Request, num_blocks: int, num_tokens: int) -> PrefixHit:
        tables = []
        for group, manager in enumerate(self.groups):
            table = [NULL_BLOCK] * min(manager.first_needed(num_tokens), num_blocks)
            for index in range(len(table), num_blocks):
                block = self._block(request, group, index)
                assert block is not None, "a hit lacks a block"
                table.append(block)
            tables.append(table)
        return PrefixHit(BlockTables(tables[0], tables[1:]), num_tokens)

    def can_allocate(self, request: Request, hit: PrefixHit) -> bool:
        """Whether tables for all known tokens fit, given what is cached of them."""
        num_new, counts = 0, self.pool.ref_counts
        for manager, table in zip(self.groups, tables_of(hit.blocks), strict=True):
            num_entries = manager.num_entries(request.num_tokens, hit.num_tokens)
            num_new += max(0, num_entries - len(table))
            shared = [block for block in table if block != NULL_BLOCK]
            if manager.window is not None:  # what others hold as well is promised
                num_new += len(shared)
                continue
            num_new += sum(counts[block] == 0 for block in shared)
            if hit.num_tokens < len(table) * manager.block_size:  # writes into the last block
                num_new += counts[table[-1]] > 0
        return num_new <= self.grouped.num_available

    def make_findable(self, request: Request, end: int) -> None:
        """Make findable, in each group, the blocks that tokens `.. end - 1` fill."""
        first = self.num_findable.get(request.request_id, 0)
        num_full = min(end, len(request.token_ids)) // self.kv.block_size
        if num_full <= first or not self.is_enabled:
            return
        for group, manager in enumerate(self.groups):
            table = manager.block_tables[request.request_id]
            for index in range(first, num_full):
                name = self._name(request, group, index)
                if table[index] != NULL_BLOCK and self.pool.remember(table[index], name):
                    self.pending.add(table[index])
        self.num_findable[request.request_id] = num_full

    def forget_blocks(self, request: Request) -> None:
        """Make the blocks of a request that went wrong unfindable, those that it gave back, too;
        their owners keep them."""
        for group in range(len(self.groups)):
            for index in range(len(request.token_ids) // self.kv.block_size):
                block = self._block(request, group, index)
                if block is not None:
                    self.pool.forget(block)

    def _block(self, request: Request, group: int, index: int) -> int | None:
        return self.pool.block_of.get(self._name(request, group, index))

    def _name(self, request: Request, group: int, index: int) -> bytes:
        """Return the name of a full block: its group, and the hash of its tokens."""
        return bytes((group,)) + self._hash(request, index)


class GroupPreempter(Preempter):
    """Swaps what the windows of a request still see. Its host blocks are those of one group after
    the other."""

    def __init__(self, kv: GroupedBlocks, num_host_blocks: int) -> None:
        super().__init__(kv, num_host_blocks)
        self.grouped = kv
        self.places: dict[str, list[tuple[int, int]]] = {}
        """Group and entry of each host block of a swapped request."""

    def _swap_out(self, victim: Request, plan: StepPlan, num_tokens: int) -> bool:
        places = self.grouped.written(victim)
        self.places[victim.request_id] = places
        is_out = super()._swap_out(victim, plan, len(places) * self.kv.block_size)
        if not is_out:
            del self.places[victim.request_id]
        return is_out

    def swap_in(self, request: Request, plan: StepPlan) -> None:
        """Bring a swapped request's KV back into the blocks that it has been given."""
        super().swap_in(request, plan)
        del self.places[request.request_id]

    def reset(self) -> None:
        """Give back all host memory."""
        super().reset()
        self.places.clear()

    def _moves(self, request: Request) -> list[tuple[int, int]]:
        """Return pairs of device block and host block. A draft that failed has left host blocks
        that no token needs."""
        tables = tables_of(self.kv.block_tables[request.request_id])
        host = self.host.block_tables[request.request_id]
        pairs = zip(self.places[request.request_id], host, strict=True)
        return [
            (tables[group][index], host_block)
            for (group, index), host_block in pairs
            if index < len(tables[group]) and tables[group][index] != NULL_BLOCK
        ]


class HybridKVCacheManager(KVCacheManager):
    """M4's KV manager, for layers in groups."""

    def __init__(self, config: EngineConfig, num_blocks: int, groups: LayerGroups) -> None:
        self.events: list[KVEvent] = []
        self.pool = CachingBlockPool(num_blocks, self.events)
        self.grouped = GroupedBlocks(
            self.pool, config.block_size, self.events, groups.windows, longest_reach(config)
        )
        self.blocks = self.grouped
        self.num_layers = groups.size
        self.prefix_cache = HybridPrefixCache(self.grouped, self.pool, config.enable_prefix_caching)
        num_host_blocks = groups.num_host_blocks(config, num_blocks)
        self.preempter = self.group_preempter = GroupPreempter(self.grouped, num_host_blocks)
        self._found: tuple[Request, PrefixHit] | None = None

    def allocate(self, request: Request, plan: StepPlan) -> int:
        """Give a request blocks for all its known tokens, as M4 does. Swapped-out KV comes back
        into tables that begin where windows do."""
        if request.status is not RequestStatus.SWAPPED:
            return super().allocate(request, plan)
        hit, self._found = self._hit(request), None
        self.grouped.adopt(request.request_id, hit.blocks)
        self.grouped.append(request.request_id, hit.num_tokens, request.num_tokens)
        self.preempter.swap_in(request, plan)
        return 0

    def _hit(self, request: Request) -> PrefixHit:
        hit = super()._hit(request)
        if request.status is RequestStatus.SWAPPED:
            first, *further = (
                [NULL_BLOCK] * group.first_needed(hit.num_tokens) for group in self.grouped.groups
            )
            hit = PrefixHit(BlockTables(first, further), hit.num_tokens)
        return hit

    def free(self, request: Request) -> None:
        """Take back a request's blocks, on the device or in host memory, if it has any."""
        super().free(request)
        self.group_preempter.places.pop(request.request_id, None)

    def append(self, request: Request, plan: StepPlan, num_guesses: int = 0) -> bool:
        """Make room for a running request's next token, first in what it gives back."""
        end = request.num_tokens + num_guesses
        if self.grouped.is_at_rest(request, end):
            return True
        self.grouped.give_back(request)
        if not super().append(request, plan, num_guesses):
            return False
        self.grouped.note_rest(request, end)
        return True

    def cache(self, request: Request, end: int) -> None:
        """Make findable the blocks that tokens `.. end - 1` fill: their step is planned. A prompt
        first gives back what these tokens do not see, and takes as many blocks."""
        if not self.grouped.is_at_rest(request, request.num_tokens):
            self.grouped.give_back(request)
            self.grouped.take_as_many(request)
        super().cache(request, end)

    def check(self, running: Sequence[Request], waiting: Iterable[Request]) -> None:
        """Assert M4's invariants, and that requests at rest write into blocks of their own."""
        super().check(running, waiting)
        for request in running:
            self.grouped.check_rest(request)

    def usage(self, running: Sequence[Request], watermark: int) -> KVUsage:
        """Return how full KV memory is. Tokens are counted once for each group."""
        usage = super().usage(running, watermark)
        return replace(usage, stored_tokens=self.grouped.stored_tokens(running))

    def stats(self, running: Sequence[Request]) -> dict[str, object]:
        """Return M4's figures; of tokens, each once for each group. `num_layers` is how many layers
        have the KV of a token so counted."""
        size, stored = self.grouped.block_size, self.grouped.stored_tokens
        wasted = {
            each.request_id: size
            * sum(len(group.held_by(each.request_id)) for group in self.grouped.groups)
            - stored([each])
            for each in running
        }
        kv = {
            "num_layers": self.num_layers,
            "wasted_tokens": self.pool.num_used * size - stored(running),
            "wasted_tokens_by_request": wasted,
        }
        return {**super().stats(running), "kv": kv}


def grouped_scheduler(
    make_scheduler: Callable[..., Scheduler],
    config: EngineConfig,
    max_model_len: int,
    num_blocks: int,
    groups: LayerGroups,
    **parts: Any,
) -> Scheduler:
    """Return M4's scheduler, or a subclass of it, with the KV manager for groups in the place of
    its own. It plans as before.

    parts: its further arguments.

    Raises:
        InputError: the blocks do not hold a request of `max_model_len`.
    """
    # M4 wants blocks for all tokens. Here fewer may do.
    num_filled = config.num_blocks_for(max_model_len)
    scheduler = make_scheduler(config, max_model_len, max(num_blocks, num_filled), **parts)
    num_needed = groups.num_blocks_for(config, max_model_len)
    if num_needed > num_blocks:
        raise InputError(
            f"one request of max_model_len={max_model_len} takes {num_needed} KV blocks of "
            f"{config.block_size} tokens in {len(groups)} groups of layers, and there are "
            f"{num_blocks}: raise kv_cache_tokens or lower max_model_len"
        )
    scheduler.num_blocks = num_blocks
    scheduler.num_host_blocks = groups.num_host_blocks(config, num_blocks)
    scheduler.kv = HybridKVCacheManager(config, num_blocks, groups)
    if scheduler.speculation:
        scheduler.speculation.kv = scheduler.kv
    return scheduler
