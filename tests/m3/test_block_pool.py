"""The block pool: reference counts, the order of the free list, and that all is O(1)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import pytest

from m3_paged.block_pool import BlockPool


def test_a_new_pool_is_all_free():
    pool = BlockPool(3)
    assert (pool.num_free, pool.num_used) == (3, 0)
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


def test_freeing_twice_and_sharing_what_is_free_are_caught():
    pool = BlockPool(2)
    block = pool.allocate()
    pool.free(block)
    with pytest.raises(AssertionError, match=f"block {block} is freed twice"):
        pool.free(block)
    with pytest.raises(AssertionError, match=f"block {block} is free and cannot be shared"):
        pool.share(block)
    assert pool.num_free == 2


def test_reset_gives_all_blocks_back_in_order():
    pool = BlockPool(4)
    for _ in range(3):
        pool.allocate()
    pool.share(1)
    pool.free(0)
    pool.reset()
    assert (pool.ref_counts, pool.num_used) == ([0] * 4, 0)
    assert [pool.allocate() for _ in range(4)] == [0, 1, 2, 3]


class Ends:
    """A deque of which only the ends and the length are in reach, at whatever length: O(1)."""

    def __init__(self, items: Iterable[int]) -> None:
        items = deque(items)
        self.append, self.popleft = items.append, items.popleft
        self._length = items.__len__

    def __len__(self) -> int:
        return self._length()


def test_operations_look_at_the_ends_of_the_free_list_alone():
    """A search or a shift would cost more in a larger pool."""
    pool = BlockPool(100)
    assert type(pool.free_blocks) is deque
    pool.free_blocks = Ends(pool.free_blocks)
    blocks = [pool.allocate() for _ in range(50)]
    for block in blocks:
        pool.share(block)
        pool.free(block)
    for block in reversed(blocks):
        pool.free(block)
    assert (pool.num_free, pool.num_used) == (100, 0)
