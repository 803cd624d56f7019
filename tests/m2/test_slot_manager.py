"""Slots: one a request, the lowest free one, and none is ever lost."""

from __future__ import annotations

import random

import pytest

from m2_batching.slot_manager import SlotManager
from milestone_llm.engine.kv import KVEvent


def allocate(manager: SlotManager, name: str) -> int:
    manager.allocate(name, num_tokens=1)
    (slot,) = manager.blocks_of(name)
    return slot


def test_the_lowest_free_slot_is_handed_out():
    manager = SlotManager(4)
    assert [allocate(manager, name) for name in "abcd"] == [0, 1, 2, 3]
    for name in "cab":
        manager.free(name)
    assert [allocate(manager, name) for name in "efg"] == [0, 1, 2]


def test_there_is_room_until_every_slot_is_taken():
    manager = SlotManager(2)
    for name in "ab":
        assert manager.can_allocate(10**6), "a slot holds whatever a request may grow to"
        allocate(manager, name)
    assert not manager.can_allocate(1)
    assert "0 of 2" in manager.describe(1)
    manager.free("a")
    assert manager.can_allocate(1)


def test_events_tell_who_got_and_gave_back_which_slot():
    manager = SlotManager(2)
    allocate(manager, "a")
    allocate(manager, "b")
    manager.free("a")
    assert manager.events == [
        KVEvent("alloc", "a", [0]),
        KVEvent("alloc", "b", [1]),
        KVEvent("free", "a", [0]),
    ]


def test_the_watermark_is_the_most_that_was_ever_in_use():
    manager = SlotManager(4)
    for name in "abc":
        allocate(manager, name)
    for name in "abc":
        manager.free(name)
    allocate(manager, "d")
    assert manager.watermark == 3


@pytest.mark.parametrize("damage", ["lost", "owned twice", "owned and free"])
def test_the_invariant_check_sees_a_damaged_book(damage):
    manager = SlotManager(3)
    allocate(manager, "a")
    manager.check_invariants()
    if damage == "lost":
        manager.free_slots.pop()
    elif damage == "owned twice":
        manager.owners["b"] = manager.owners["a"]
    else:
        manager.free_slots.append(manager.owners["a"])
    with pytest.raises(AssertionError, match="slots lost or owned twice"):
        manager.check_invariants()


def test_slots_are_neither_lost_nor_shared_over_random_use():
    rng, manager = random.Random(0), SlotManager(6)
    owned: list[str] = []
    for step in range(5000):
        if owned and (not manager.can_allocate(1) or rng.random() < 0.5):
            manager.free(owned.pop(rng.randrange(len(owned))))
        else:
            slot = allocate(manager, f"q{step}")
            taken = {manager.owners[name] for name in owned}
            assert slot == min(set(range(6)) - taken)
            owned.append(f"q{step}")
        assert len({manager.owners[name] for name in owned}) == len(owned)
        manager.check_invariants()
    for name in owned:
        manager.free(name)
    assert sorted(manager.free_slots) == list(range(6))
