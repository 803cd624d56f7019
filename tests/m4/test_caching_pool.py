"""The pool whose free blocks keep their content: found, revived, evicted, forgotten, in O(1)."""

from __future__ import annotations

import timeit

import pytest

from m4_prefix_chunked.caching_pool import CachingBlockPool

H = [bytes([i]) * 32 for i in range(10)]


def pool_of(num_blocks: int, *, cached: int = 0) -> CachingBlockPool:
    """A pool whose first `cached` blocks have been used, remembered and freed, 0 first."""
    pool = CachingBlockPool(num_blocks)
    blocks = [pool.allocate() for _ in range(cached)]
    for block in blocks:
        assert pool.remember(block, H[block])
    for block in blocks:
        pool.free(block)
    return pool


def test_a_freed_block_can_still_be_found():
    pool = pool_of(3, cached=2)
    assert (pool.block_of, pool.hash_of) == ({H[0]: 0, H[1]: 1}, {0: H[0], 1: H[1]})
    assert (pool.num_free, pool.num_cached_free) == (3, 2)


def test_blocks_without_content_go_first_then_the_least_recently_used():
    pool = pool_of(4, cached=2)  # 2 and 3 were never used
    assert [pool.allocate() for _ in range(4)] == [2, 3, 0, 1]
    assert pool.evicted == [0, 1]


def test_an_evicted_block_cannot_be_found():
    pool = pool_of(2, cached=2)
    assert pool.allocate() == 0
    assert (pool.block_of, pool.hash_of) == ({H[1]: 1}, {1: H[1]})
    assert (pool.num_cached_free, pool.evicted) == (1, [0])


def test_taking_a_block_without_content_evicts_nothing():
    pool = pool_of(3, cached=2)
    assert pool.allocate() == 2
    assert (pool.evicted, pool.num_cached_free) == ([], 2)


def test_a_hit_takes_a_free_block_off_the_list_from_wherever_it_is():
    pool = pool_of(3, cached=3)
    pool.share(1)
    assert (list(pool.free_blocks), pool.ref_counts) == ([0, 2], [0, 1, 0])
    assert (pool.num_free, pool.num_cached_free, pool.num_used) == (2, 2, 1)
    assert pool.evicted == []
    assert pool.block_of[H[1]] == 1


def test_a_hit_on_a_used_block_counts_one_more_owner():
    pool = CachingBlockPool(2)
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


def test_the_watermark_counts_revived_blocks():
    pool = pool_of(3, cached=3)
    pool.watermark = 0
    pool.share(2)
    pool.share(2)
    assert pool.watermark == 1
    pool.share(0)
    assert pool.watermark == 2


def test_two_blocks_of_the_same_content_are_not_merged_and_the_first_is_found():
    pool = CachingBlockPool(2)
    first, second = pool.allocate(), pool.allocate()
    assert pool.remember(first, H[0])
    assert not pool.remember(second, H[0])
    assert (pool.block_of, pool.hash_of) == ({H[0]: first}, {first: H[0]})
    pool.free(second)
    assert (pool.num_free, pool.num_cached_free) == (1, 0), "nobody finds the second"
    pool.free(first)
    assert [pool.allocate(), pool.allocate()] == [second, first]
    assert pool.evicted == [first]


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


def test_forget_all_leaves_the_order_of_the_free_list():
    pool = pool_of(3, cached=3)
    pool.share(0)
    pool.free(0)
    pool.forget_all()
    assert (pool.block_of, pool.hash_of, pool.num_cached_free) == ({}, {}, 0)
    assert [pool.allocate() for _ in range(3)] == [1, 2, 0]
    assert pool.evicted == []


def test_freeing_twice_and_sharing_a_free_block_without_content_are_caught():
    pool = pool_of(2, cached=1)
    with pytest.raises(AssertionError, match="block 0 is freed twice"):
        pool.free(0)
    with pytest.raises(AssertionError, match="block 1 is free and its content forgotten"):
        pool.share(1)
    assert (pool.num_free, pool.num_cached_free) == (2, 1)


def test_operations_cost_the_same_in_a_pool_of_two_hundred_thousand_as_of_a_hundred():
    """O(1). A search or a shift through the big pool would take a thousand times as long."""
    small, big = full_cache(100), full_cache(200_000)
    assert fastest_round(big) < 20 * fastest_round(small)


def full_cache(num_blocks: int) -> CachingBlockPool:
    """A pool in which every block is free and cached."""
    pool = CachingBlockPool(num_blocks)
    for number in range(num_blocks):
        pool.remember(pool.allocate(), number.to_bytes(32, "big"))
    for block in range(num_blocks):
        pool.free(block)
    return pool


def fastest_round(pool: CachingBlockPool) -> float:
    """Seconds for 50 hits in the middle of the free list and 50 evictions; the best of several."""

    def work() -> None:
        middle = pool.num_blocks // 2
        hits = [block for block in range(middle, middle + 50) if block in pool.hash_of]
        for block in hits:
            pool.share(block)
        for block in hits:
            pool.free(block)
        new = [pool.allocate() for _ in range(50)]
        for block in new:
            pool.remember(block, block.to_bytes(32, "big"))
            pool.free(block)

    return min(timeit.repeat(work, number=1, repeat=20))
