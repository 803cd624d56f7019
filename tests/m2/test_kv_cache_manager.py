"""Regions: one a request, the lowest free one, and none is ever lost."""

from __future__ import annotations

import pytest

from helpers.schedulers import of_length
from m2_batching.kv_cache_manager import KVCacheManager
from milestone_llm.core.kv import KVEvent


def manager_of(num_regions: int) -> KVCacheManager:
    return KVCacheManager(num_regions, max_model_len=16)


def allocate(manager: KVCacheManager, name: str) -> int:
    manager.allocate(of_length(name, 4))
    return manager.regions[name]


def test_the_lowest_free_region_is_handed_out():
    manager = manager_of(4)
    assert [allocate(manager, name) for name in "abcd"] == [0, 1, 2, 3]
    for name in "cab":
        manager.free(of_length(name, 4))
    assert [allocate(manager, name) for name in "efg"] == [0, 1, 2]


@pytest.mark.parametrize("damage", ["lost", "owned twice", "owned and free"])
def test_the_invariant_check_sees_a_damaged_book(damage):
    manager = manager_of(3)
    allocate(manager, "a")
    running = [of_length("a", 4)]
    manager.check(running, [])
    if damage == "lost":
        manager.free_regions.pop()
    elif damage == "owned twice":
        manager.regions["b"] = manager.regions["a"]
    else:
        manager.free_regions.append(manager.regions["a"])
    with pytest.raises(AssertionError, match="regions lost or owned twice"):
        manager.check(running, [])


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_reset_takes_all_regions_back_in_whatever_state_the_books_are(is_torn):
    manager = manager_of(3)
    for name in "ab":
        allocate(manager, name)
    if is_torn:  # interrupted in `allocate`: taken off the list, given to nobody
        manager.free_regions.pop()
    manager.reset()
    manager.check([], [])
    assert manager.events[-2:] == [KVEvent("free", "a", [0]), KVEvent("free", "b", [1])]
    assert [allocate(manager, name) for name in "abc"] == [0, 1, 2]
