"""Block tables: when they grow, who shares, and what is copied before a write."""

from __future__ import annotations

import pytest

from m3_paged.block_manager import BlockManager
from m3_paged.block_pool import BlockPool
from milestone_llm.core.kv import KVEvent


def filled(num_blocks: int, block_size: int, **num_tokens: int) -> BlockManager:
    """A manager with a table for each name, of this many tokens."""
    manager = BlockManager(BlockPool(num_blocks), block_size, events=[])
    for name, count in num_tokens.items():
        manager.allocate(name, count)
    return manager


def grow(manager: BlockManager, name: str, position: int) -> list[tuple[int, int]]:
    """Append one token."""
    assert manager.can_append(name, position, position + 1)
    copies = manager.append(name, position, position + 1)
    manager.check_invariants()
    return copies


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks"), [(1, 1), (3, 1), (4, 1), (5, 2), (8, 2), (9, 3)]
)
def test_a_table_has_blocks_for_its_tokens_and_none_to_spare(num_tokens, num_blocks):
    manager = filled(4, 4, a=num_tokens)
    assert len(manager.block_tables["a"]) == num_blocks
    assert manager.pool.num_used == num_blocks


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_table_grows_exactly_when_its_last_block_is_full(block_size):
    manager = filled(64 // block_size, block_size, a=1)
    lengths = []
    for position in range(1, 3 * block_size):
        assert grow(manager, "a", position) == []
        lengths.append(len(manager.block_tables["a"]))
    assert lengths == [position // block_size + 1 for position in range(1, 3 * block_size)]


def test_growing_keeps_the_blocks_there_are():
    manager = filled(4, 2, a=2, b=1)
    grow(manager, "a", 2)
    assert manager.block_tables == {"a": [0, 2], "b": [1]}


def test_a_table_fits_up_to_the_last_free_block():
    manager = filled(4, 4, a=4)
    assert manager.can_allocate(12)
    assert not manager.can_allocate(13)
    manager.allocate("b", 12)
    assert manager.pool.num_free == 0
    assert manager.can_allocate(0)
    assert not manager.can_allocate(1)


def test_in_a_full_pool_a_token_is_appended_only_within_the_last_block():
    manager = filled(2, 4, a=4, b=3)
    assert manager.can_append("b", 3, 4)
    assert not manager.can_append("b", 4, 5)
    assert not manager.can_append("a", 4, 5)
    grow(manager, "b", 3)
    manager.free("a")
    grow(manager, "b", 4)


def test_a_forks_table_names_the_same_blocks_and_is_its_own_list():
    manager = filled(4, 4, a=6)
    manager.fork("a", "b")
    manager.check_invariants()
    assert manager.block_tables["b"] == manager.block_tables["a"]
    assert manager.pool.num_used == 2
    manager.block_tables["b"].append(9)
    assert 9 not in manager.block_tables["a"]


def test_writing_into_a_shared_block_copies_that_block_alone():
    manager = filled(4, 4, a=6)
    manager.fork("a", "b")
    assert grow(manager, "a", 6) == [(1, 2)]
    assert manager.block_tables == {"a": [0, 2], "b": [0, 1]}
    assert manager.num_copies == 1


def test_the_last_sharer_writes_in_place():
    manager = filled(4, 4, a=6)
    for fork in ("b", "c"):
        manager.fork("a", fork)
    assert grow(manager, "a", 6) == [(1, 2)]
    assert grow(manager, "b", 6) == [(1, 3)]
    assert manager.pool.num_free == 0
    assert grow(manager, "c", 6) == []
    assert [table[1] for table in manager.block_tables.values()] == [2, 3, 1]


def test_full_shared_blocks_are_never_copied():
    """The next token of a full prompt goes into a new block: there is nothing to copy."""
    manager = filled(4, 4, a=8)
    manager.fork("a", "b")
    assert grow(manager, "a", 8) == []
    assert grow(manager, "b", 8) == []
    assert manager.block_tables == {"a": [0, 1, 2], "b": [0, 1, 3]}
    assert manager.num_copies == 0


def test_a_copy_needs_a_free_block_too():
    manager = filled(2, 4, a=6)
    manager.fork("a", "b")
    assert not manager.can_append("a", 6, 7)
    manager.free("b")
    assert manager.can_append("a", 6, 7)


def test_an_append_that_copies_and_grows_needs_both_blocks():
    manager = filled(3, 4, a=6)
    manager.fork("a", "b")
    assert manager.can_append("a", 6, 8)
    assert not manager.can_append("a", 6, 9)  # copy of block 1 and a third block: two, one is free


def test_what_a_request_frees_others_still_share():
    manager = filled(4, 4, a=6)
    manager.fork("a", "b")
    manager.free("a")
    manager.check_invariants()
    assert manager.pool.num_used == 2
    manager.free("b")
    manager.check_invariants()
    assert manager.pool.num_used == 0


def test_a_requests_last_block_is_freed_before_its_first():
    manager = filled(3, 1, a=3)
    manager.free("a")
    assert list(manager.pool.free_blocks) == [2, 1, 0]


def test_events_tell_what_happened_to_which_blocks():
    manager = filled(4, 4, a=6)
    manager.fork("a", "b")
    manager.append("b", 6, 9)
    manager.free("a")
    assert manager.events == [
        KVEvent("alloc", "a", [0, 1]),
        KVEvent("share", "b", [0, 1]),
        KVEvent("copy_on_write", "b", [1, 2]),  # source, copy
        KVEvent("alloc", "b", [3]),
        KVEvent("free", "a", [0, 1], held=[0]),
    ]


@pytest.mark.parametrize("num_shared", [0, 2])
def test_a_table_can_begin_with_blocks_that_others_hold(num_shared):
    manager = filled(4, 4, a=6)
    manager.adopt("b", [0, 1][:num_shared])
    manager.check_invariants()
    assert manager.append("b", 4 * num_shared, 4 * num_shared + 2) == []
    assert manager.block_tables == {"a": [0, 1], "b": [*range(num_shared), 2]}
    shared = [KVEvent("share", "b", [0, 1])] if num_shared else []
    assert manager.events[1:] == [*shared, KVEvent("alloc", "b", [2])]


def test_reset_drops_all_tables_in_whatever_state_the_books_are():
    manager = filled(4, 4, a=6, b=1)
    manager.fork("a", "c")
    del manager.events[:]
    lose_a_block(manager)
    manager.reset()
    manager.check_invariants()
    assert (manager.block_tables, manager.pool.num_used) == ({}, 0)
    tables = [("a", [0, 1]), ("b", [2]), ("c", [0, 1])]
    assert manager.events == [KVEvent("free", *table) for table in tables]


def lose_a_block(manager: BlockManager) -> None:
    manager.pool.ref_counts[manager.pool.allocate()] = 0


def take_a_block_without_a_table(manager: BlockManager) -> None:
    manager.pool.allocate()


def count_a_sharer_too_many(manager: BlockManager) -> None:
    manager.pool.share(0)


def free_a_block_in_use(manager: BlockManager) -> None:
    manager.pool.free(0)
    manager.pool.ref_counts[0] = 1
    lose_a_block(manager)  # so that the sum is right again


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_block, "blocks lost"),
        (take_a_block_without_a_table, "block 2: 0 tables, count 1"),
        (count_a_sharer_too_many, "block 0: 1 tables, count 2"),
        (free_a_block_in_use, "both free and owned"),
    ],
)
def test_the_invariant_check_notices_damage(damage, message):
    manager = filled(4, 4, a=6)
    manager.check_invariants()
    damage(manager)
    with pytest.raises(AssertionError, match=message):
        manager.check_invariants()
