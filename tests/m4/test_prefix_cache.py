"""Block hashes and the tables made with them: what is found, shared, copied and forgotten."""

from __future__ import annotations

import hashlib
import itertools
import struct

import pytest

from m4_prefix_chunked.prefix_cache import PrefixCache, hash_block
from milestone_llm.engine.kv import KVEvent
from milestone_llm.engine.request import Request
from prefix_helpers import prompt, request_of


def cached(cache: PrefixCache, name: str, token_ids: list[int], **fields: str) -> Request:
    """A request whose tokens are all computed, in a step of its own."""
    request = request_of(name, token_ids, **fields)
    cache.begin_step()
    start, _ = cache.allocate_with_prefix(request)
    cache.cache_full_blocks(request, start, request.num_tokens)
    cache.begin_step()
    cache.check_invariants()
    return request


def found(cache: PrefixCache, token_ids: list[int], **fields: str) -> tuple[list[int], int]:
    """Blocks and tokens that a newcomer would find."""
    request = request_of("newcomer", token_ids, **fields)
    result = cache.find_prefix(request)
    cache.forget_request("newcomer")
    return result


# --- the hash chain -----------------------------------------------------------------------------


def test_a_hash_is_sha256_of_parent_and_tokens():
    """Cryptographic, unlike Python's `hash`, and the same in every process."""
    parent = bytes(range(32))
    value = hash_block(parent, [1, 2])
    assert value == hashlib.sha256(parent + struct.pack("=2q", 1, 2)).digest()
    others = [hash_block(parent, [2, 1]), hash_block(value, [1, 2]), hash_block(parent, [1, 2, 0])]
    assert len({value, *others}) == 4


def test_token_boundaries_enter_the_hash():
    """As text, [1, 23] and [12, 3] would be the same "123"."""
    variants = [[1, 23], [12, 3], [123, 0], [123], [1, 2, 3], [257, 0], [1, 1]]
    assert len({hash_block(b"", tokens) for tokens in variants}) == len(variants)


def test_the_same_tokens_after_another_beginning_are_another_block():
    cache = PrefixCache(16, 4)
    cached(cache, "a", prompt("ABC", 1))
    assert found(cache, prompt("ABC", 1))[1] == 12
    for blocks in ("BC", "XBC", "AC", "CBA", "BAC", "AABC"):
        assert found(cache, prompt(blocks, 1))[1] == (4 if blocks[0] == "A" else 0), blocks


def test_every_order_of_the_same_blocks_is_its_own_content():
    cache = PrefixCache(64, 4)
    for name in map("".join, itertools.permutations("ABC")):
        cached(cache, name, prompt(name, 1))
    # 3 first blocks, 6 pairs, 6 triples.
    assert len(cache.pool.block_of) == 15


def test_salts_keep_tenants_apart_from_the_first_block_on():
    cache = PrefixCache(16, 4)
    cached(cache, "a", prompt("AB", 1), salt="tenant 1")
    assert found(cache, prompt("AB", 1), salt="tenant 1")[1] == 8
    for salt in ("", "tenant 2", "tenant 1 "):
        assert found(cache, prompt("AB", 1), salt=salt) == ([], 0)


def test_any_text_may_be_a_salt():
    cache = PrefixCache(16, 4)
    for salt in ("\ud800", "日本", "\0", "a" * 10_000):
        cached(cache, f"r{salt}", prompt("A", 1), salt=salt)
        assert found(cache, prompt("A", 1), salt=salt)[1] == 4


def test_each_block_is_hashed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "m4_prefix_chunked.prefix_cache.hash_block",
        lambda parent, tokens: calls.append(tokens) or hash_block(parent, tokens),
    )
    cache = PrefixCache(16, 4)
    request = cached(cache, "a", prompt("ABC", 3))
    for _ in range(3):
        cache.find_prefix(request)
    assert calls == [prompt("ABC")[i : i + 4] for i in (0, 4, 8)]


# --- what is found ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_tokens", "num_blocks", "num_cached"),
    [(1, 0, 0), (3, 0, 0), (4, 1, 3), (5, 1, 4), (7, 1, 4), (8, 2, 7), (9, 2, 8), (12, 2, 8)],
)
def test_only_full_blocks_are_found_and_at_most_all_tokens_but_one(
    num_tokens, num_blocks, num_cached
):
    """Of ten tokens two blocks are full."""
    cache = PrefixCache(8, 4)
    a = cached(cache, "a", prompt("AB", 2))
    token_ids = (prompt("AB", 2) + prompt("XY"))[:num_tokens]
    assert found(cache, token_ids) == (cache.blocks_of(a.request_id)[:num_blocks], num_cached)


def test_the_longest_prefix_is_found_not_a_later_block_after_a_gap():
    cache = PrefixCache(16, 4)
    cached(cache, "a", prompt("ABC", 1))
    cache.pool.forget(cache.blocks_of("a")[1])
    assert found(cache, prompt("ABC", 1)) == (cache.blocks_of("a")[:1], 4)


def test_nothing_is_found_or_remembered_or_counted_when_switched_off():
    cache = PrefixCache(8, 4, is_enabled=False)
    cached(cache, "a", prompt("AB", 1))
    b = cached(cache, "b", prompt("AB", 1))
    assert cache.find_prefix(b) == ([], 0)
    assert cache.pool.block_of == {}
    assert cache.hashes == {}
    assert set(cache.counts.values()) == {0}


def test_finding_changes_nothing():
    cache = PrefixCache(8, 4)
    cached(cache, "a", prompt("AB", 1))
    cache.free("a")
    before = (list(cache.pool.free_blocks), list(cache.pool.ref_counts), dict(cache.counts))
    assert found(cache, prompt("AB", 1))[1] == 8
    assert cache.can_allocate_with_prefix(request_of("b", prompt("AB", 1)))
    assert (list(cache.pool.free_blocks), cache.pool.ref_counts, cache.counts) == before


# --- tables -------------------------------------------------------------------------------------


def test_a_hit_shares_the_blocks_of_who_still_runs():
    cache = PrefixCache(8, 4)
    cached(cache, "a", prompt("AB", 1))
    b = request_of("b", prompt("AB", 3))
    assert cache.allocate_with_prefix(b) == (8, [])
    assert cache.owners == {"a": [0, 1, 2], "b": [0, 1, 3]}
    assert cache.events[-2:] == [KVEvent("share", "b", [0, 1]), KVEvent("alloc", "b", [3])]
    cache.check_invariants()


def test_a_hit_revives_free_blocks_before_anything_could_evict_them():
    """Two blocks are free, both cached; the newcomer needs them and one more: not the two."""
    cache = PrefixCache(3, 4)
    cached(cache, "a", prompt("AB", 1))
    cache.free("a")
    assert list(cache.pool.free_blocks) == [2, 1, 0]
    assert cache.allocate_with_prefix(request_of("b", prompt("AB", 3))) == (8, [])
    assert cache.blocks_of("b") == [0, 1, 2]
    assert cache.take_evictions() == []


def test_a_wholly_cached_prompt_is_written_in_place_where_nobody_reads_it():
    cache = PrefixCache(8, 4)
    cached(cache, "a", prompt("AB"))
    cache.free("a")
    assert cache.allocate_with_prefix(request_of("b", prompt("AB"))) == (7, [])
    assert cache.blocks_of("b") == [0, 1]
    assert cache.num_copies == 0


def test_a_wholly_cached_prompt_copies_its_last_block_where_somebody_reads_it():
    cache = PrefixCache(8, 4)
    cached(cache, "a", prompt("AB"))
    b = request_of("b", prompt("AB"))
    assert cache.allocate_with_prefix(b) == (7, [(1, 2)])
    cache.cache_full_blocks(b, 7, 8)
    assert cache.owners == {"a": [0, 1], "b": [0, 2]}
    assert cache.events[-1] == KVEvent("copy_on_write", "b", [1, 2])
    assert found(cache, prompt("AB", 1))[0] == [0, 1], "the copy is not found, nor merged"
    cache.check_invariants()


def test_the_last_block_of_an_equal_prompt_is_not_copied_before_it_is_written():
    """Copies come before the step's forward, and it is that forward which fills the block."""
    cache = PrefixCache(8, 4)
    a = request_of("a", prompt("AB"))
    cache.begin_step()
    cache.allocate_with_prefix(a)
    cache.cache_full_blocks(a, 0, 8)
    assert cache.pending == {0, 1}
    assert found(cache, prompt("AB")) == ([0], 4)
    assert found(cache, prompt("AB", 1)) == ([0, 1], 8), "to read it is fine"
    cache.begin_step()
    assert found(cache, prompt("AB")) == ([0, 1], 7)


@pytest.mark.parametrize(
    ("num_blocks", "is_a_free", "fits"),
    [
        (4, False, True),  # a has three; b shares two and needs one
        (3, False, False),
        (3, True, True),  # revives two and takes the third
    ],
)
def test_room_is_reckoned_with_what_is_shared_and_what_is_revived(num_blocks, is_a_free, fits):
    cache = PrefixCache(num_blocks, 4)
    cached(cache, "a", prompt("AB", 1))
    if is_a_free:
        cache.free("a")
    assert cache.can_allocate_with_prefix(request_of("b", prompt("AB", 3))) == fits
    assert not cache.can_allocate_with_prefix(request_of("c", prompt("ABXYZ", 3)))


def test_room_is_reckoned_with_the_copy_of_the_last_block():
    full, roomy = PrefixCache(2, 4), PrefixCache(3, 4)
    for cache in (full, roomy):
        cached(cache, "a", prompt("AB"))
    assert not full.can_allocate_with_prefix(request_of("b", prompt("AB")))
    assert roomy.can_allocate_with_prefix(request_of("b", prompt("AB")))
    full.free("a")
    assert full.can_allocate_with_prefix(request_of("b", prompt("AB"))), "in place, if it is free"


# --- what is forgotten --------------------------------------------------------------------------


def test_the_blocks_of_a_step_that_failed_are_forgotten_and_no_others():
    cache = PrefixCache(8, 4)
    cached(cache, "a", prompt("AB", 1))
    b = request_of("b", prompt("ABCD", 1))
    cache.begin_step()
    start, _ = cache.allocate_with_prefix(b)
    cache.cache_full_blocks(b, start, 17)
    assert found(cache, prompt("ABCD", 1))[1] == 16
    cache.forget_pending()
    cache.free("b")
    assert found(cache, prompt("ABCD", 1))[1] == 8
    cache.check_invariants()


def test_a_row_makes_only_the_blocks_findable_that_it_completes():
    cache = PrefixCache(8, 4)
    a = request_of("a", prompt("ABC", 1))
    cache.allocate_with_prefix(a)
    for start, end, num_found in [(0, 3, 0), (3, 6, 1), (6, 7, 1), (7, 8, 2), (8, 13, 3)]:
        cache.cache_full_blocks(a, start, end)
        assert len(cache.pool.block_of) == num_found, (start, end)


def test_reset_is_refused_while_a_block_is_in_use():
    cache = PrefixCache(8, 4)
    cached(cache, "a", prompt("AB", 1))
    assert cache.reset() is False
    assert found(cache, prompt("AB", 1))[1] == 8
    cache.free("a")
    assert cache.reset() is True
    assert found(cache, prompt("AB", 1)) == ([], 0)
    cache.check_invariants()


def test_a_finished_requests_hashes_are_dropped_its_blocks_stay():
    cache = PrefixCache(8, 4)
    cached(cache, "a", prompt("AB", 1))
    cache.free("a")
    cache.forget_request("a")
    cache.forget_request("a")
    assert cache.hashes == {}
    assert found(cache, prompt("AB", 1))[1] == 8


def test_counts_of_queries_hits_tokens_and_evictions():
    cache = PrefixCache(4, 4)
    cached(cache, "a", prompt("AB", 1))
    cache.free("a")
    cached(cache, "b", prompt("AB"))
    cache.free("b")
    cached(cache, "c", prompt("XYZ", 1))
    assert [cache.take_evictions(), cache.take_evictions()] == [[1, 0], []]
    assert cache.counts == {
        "queries": 3,
        "hits": 1,
        "queried_tokens": 9 + 8 + 13,
        "saved_tokens": 7,
        "evictions": 2,
    }


@pytest.mark.parametrize("damage", ["block_of", "hash_of", "num_cached_free"])
def test_the_invariant_check_notices_damage(damage):
    cache = PrefixCache(8, 4)
    cached(cache, "a", prompt("AB", 1))
    cache.free("a")
    cache.check_invariants()
    if damage == "num_cached_free":
        cache.pool.num_cached_free += 1
    else:
        getattr(cache.pool, damage).popitem()
    with pytest.raises(AssertionError):
        cache.check_invariants()
