"""The block pool: reference counts, the order of the free list, and that nothing gets dearer."""

from __future__ import annotations

import timeit

import pytest

from m3_paged.block_pool import BlockPool


def test_a_new_pool_is_all_free():
    pool = BlockPool(3)
    assert (pool.num_free, pool.num_used, pool.watermark) == (3, 0, 0)
    assert pool.ref_counts == [0, 0, 0]


def test_blocks_are_handed_out_in_order_and_each_once():
    pool = BlockPool(4)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_used) == (0, 4)


def test_a_freed_block_is_reused_last():
    """First in, first out: what was freed longest ago goes first (M4's cache lives by that)."""
    pool = BlockPool(4)
    for _ in range(3):
        pool.allocate()
    pool.free(1)
    pool.free(0)
    assert [pool.allocate() for _ in range(3)] == [3, 1, 0]


def test_a_shared_block_is_free_only_after_its_last_owner_left():
    pool = BlockPool(1)
    block = pool.allocate()
    pool.share(block)
    pool.share(block)
    for num_owners in (3, 2, 1):
        assert (pool.ref_counts, pool.num_free) == ([num_owners], 0)
        pool.free(block)
    assert (pool.ref_counts, pool.num_free) == ([0], 1)


def test_watermark_is_the_most_ever_used_and_sharing_does_not_raise_it():
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(3)]
    pool.share(blocks[0])
    for block in blocks:
        pool.free(block)
    pool.allocate()
    assert (pool.num_used, pool.watermark) == (2, 3)


def test_freeing_twice_and_sharing_what_is_free_are_caught():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.free(block)
    with pytest.raises(AssertionError, match=f"block {block} is freed twice"):
        pool.free(block)
    with pytest.raises(AssertionError, match=f"block {block} is free and cannot be shared"):
        pool.share(block)
    assert pool.num_free == 2


def test_reset_gives_all_blocks_back_and_keeps_the_watermark():
    pool = BlockPool(4)
    for _ in range(3):
        pool.allocate()
    pool.share(1)
    pool.free(0)
    pool.reset()
    assert (pool.ref_counts, pool.num_used, pool.watermark) == ([0] * 4, 0, 3)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]


def test_operations_cost_the_same_in_a_pool_of_a_million_as_of_a_hundred():
    """O(1). A search or a shift through the big pool would take 100 times as long and more."""
    small, big = BlockPool(100), BlockPool(1_000_000)
    assert fastest_round(big) < 20 * fastest_round(small)


def fastest_round(pool: BlockPool) -> float:
    """Seconds for allocating, sharing and freeing 50 blocks; the best of several tries."""

    def work() -> None:
        blocks = [pool.allocate() for _ in range(50)]
        for block in blocks:
            pool.share(block)
            pool.free(block)
        for block in reversed(blocks):
            pool.free(block)

    return min(timeit.repeat(work, number=1, repeat=20))
