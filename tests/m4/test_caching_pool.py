"""The pool whose free blocks keep their content: found, revived, evicted, forgotten, in O(1)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest

from m4_prefix_chunked.caching_pool import CachingBlockPool
from milestone_llm.core.kv import KVEvent

H = [bytes([i]) * 32 for i in range(10)]


def pool_of(num_blocks: int, *, cached: int = 0) -> CachingBlockPool:
    """A pool whose first `cached` blocks have been used, remembered and freed, 0 first."""
    pool = CachingBlockPool(num_blocks, events=[])
    blocks = [pool.allocate() for _ in range(cached)]
    for block in blocks:
        assert pool.remember(block, H[block])
    for block in blocks:
        pool.free(block)
    return pool


def evicted(pool: CachingBlockPool) -> list[int]:
    """Blocks whose content was given up for others, in order."""
    assert all((event.type, event.request_id) == ("evict", None) for event in pool.events)
    return [block for event in pool.events for block in event.blocks]


def test_a_freed_block_can_still_be_found():
    pool = pool_of(3, cached=2)
    assert (pool.block_of, pool.hash_of) == ({H[0]: 0, H[1]: 1}, {0: H[0], 1: H[1]})
    assert (pool.num_free, pool.num_cached_free) == (3, 2)


def test_blocks_without_content_go_first_then_the_least_recently_used():
    pool = pool_of(4, cached=2)  # 2 and 3 were never used
    assert [pool.allocate() for _ in range(4)] == [2, 3, 0, 1]
    assert evicted(pool) == [0, 1]


def test_an_evicted_block_cannot_be_found():
    pool = pool_of(2, cached=2)
    assert pool.allocate() == 0
    assert (pool.block_of, pool.hash_of) == ({H[1]: 1}, {1: H[1]})
    assert (pool.num_cached_free, evicted(pool)) == (1, [0])


def test_taking_a_block_without_content_evicts_nothing():
    pool = pool_of(3, cached=2)
    assert pool.allocate() == 2
    assert (evicted(pool), pool.num_cached_free) == ([], 2)


def test_a_hit_takes_a_free_block_off_the_list_from_wherever_it_is():
    pool = pool_of(3, cached=3)
    pool.share(1)
    assert (list(pool.free_blocks), pool.ref_counts) == ([0, 2], [0, 1, 0])
    assert (pool.num_free, pool.num_cached_free, pool.num_used) == (2, 2, 1)
    assert evicted(pool) == []
    assert pool.block_of[H[1]] == 1


def test_a_hit_on_a_used_block_counts_one_more_owner():
    pool = CachingBlockPool(2, events=[])
    block = pool.allocate()
    pool.remember(block, H[0])
    pool.share(block)
    assert (pool.ref_counts[block], pool.num_free, pool.num_cached_free) == (2, 1, 0)
    pool.free(block)
    assert (pool.num_free, pool.num_cached_free) == (1, 0), "one owner is left"
    pool.free(block)
    assert (pool.num_free, pool.num_cached_free) == (2, 1)


def test_a_touched_block_is_evicted_last():
    """Used again, and so freed again: it goes to the end of the list."""
    pool = pool_of(3, cached=3)
    pool.share(0)
    pool.free(0)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 0]


def test_two_blocks_of_the_same_content_are_not_merged_and_the_first_is_found():
    pool = CachingBlockPool(2, events=[])
    first, second = pool.allocate(), pool.allocate()
    assert pool.remember(first, H[0])
    assert not pool.remember(second, H[0])
    assert (pool.block_of, pool.hash_of) == ({H[0]: first}, {first: H[0]})
    pool.free(second)
    assert (pool.num_free, pool.num_cached_free) == (1, 0), "nobody finds the second"
    pool.free(first)
    assert [pool.allocate(), pool.allocate()] == [second, first]
    assert evicted(pool) == [first]


def test_a_block_keeps_the_first_hash_it_got():
    pool = pool_of(1)
    pool.allocate()
    assert pool.remember(0, H[0])
    assert not pool.remember(0, H[1])
    assert pool.block_of == {H[0]: 0}


def test_forgotten_content_can_be_remembered_anew():
    pool = pool_of(2)
    block = pool.allocate()
    pool.remember(block, H[0])
    pool.forget(block)
    assert pool.block_of == pool.hash_of == {}
    assert pool.remember(block, H[0])


@pytest.mark.parametrize("num_owners", [0, 1, 2])
def test_reset_frees_and_forgets_all_whatever_is_in_use(num_owners):
    pool = pool_of(3, cached=3)
    for _ in range(num_owners):
        pool.share(1)
    pool.reset()
    pool.check_invariants()
    assert (pool.block_of, pool.hash_of, pool.num_cached_free) == ({}, {}, 0)
    assert (pool.num_free, pool.ref_counts) == (3, [0, 0, 0])
    assert [pool.allocate() for _ in range(3)] == [0, 1, 2]
    assert (pool.events, pool.num_evictions) == ([], 0), "forgotten, not evicted"


def test_each_eviction_is_an_event_and_is_counted():
    """The list of events is the scheduler's, so that evictions stand among its allocations."""
    events = [KVEvent("alloc", "a", [7])]
    pool = CachingBlockPool(1, events)
    for number in range(3):
        pool.remember(pool.allocate(), H[number])
        pool.free(0)
    assert events == [KVEvent("alloc", "a", [7]), *[KVEvent("evict", None, [0])] * 2]
    assert pool.num_evictions == 2


@pytest.mark.parametrize("is_free", [True, False])
def test_a_block_can_be_forgotten_in_use_or_free(is_free):
    pool = pool_of(2, cached=2)
    if not is_free:
        pool.share(0)
    pool.forget(0)
    pool.check_invariants()
    assert (pool.block_of, pool.num_cached_free) == ({H[1]: 1}, 1)


def test_freeing_twice_and_sharing_a_free_block_without_content_are_caught():
    pool = pool_of(2, cached=1)
    with pytest.raises(AssertionError, match="block 0 is freed twice"):
        pool.free(0)
    with pytest.raises(AssertionError, match="block 1 is free and its content forgotten"):
        pool.share(1)
    assert (pool.num_free, pool.num_cached_free) == (2, 1)


class Unsearched(OrderedDict[Any, Any]):
    """A dict that nobody may walk through: each operation costs the same at any length."""

    def __iter__(self) -> Any:
        raise AssertionError("a search: it costs more in a larger pool")

    keys = values = items = __reversed__ = __iter__


def test_operations_search_nowhere():
    """Hits in the middle of the free list, evictions, and blocks that are filled and freed."""
    pool = full_cache(100)
    pool.free_blocks = Unsearched(pool.free_blocks)
    pool.block_of, pool.hash_of = Unsearched(pool.block_of), Unsearched(pool.hash_of)
    hits = range(50, 60)
    for block in hits:
        pool.share(block)
    for block in hits:
        pool.free(block)
    for block in [pool.allocate() for _ in range(10)]:
        assert pool.remember(block, bytes([200 + block]) * 32)
        pool.free(block)
    assert (pool.num_free, pool.num_cached_free, pool.num_evictions) == (100, 100, 10)


def full_cache(num_blocks: int) -> CachingBlockPool:
    """A pool in which every block is free and cached."""
    pool = CachingBlockPool(num_blocks, events=[])
    for number in range(num_blocks):
        pool.remember(pool.allocate(), number.to_bytes(32, "big"))
    for block in range(num_blocks):
        pool.free(block)
    return pool
