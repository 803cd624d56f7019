"""Block hashes and the tables made with them: what is found, shared, copied and forgotten."""

from __future__ import annotations

import hashlib
import itertools
import struct

import pytest

from m4_prefix_chunked.prefix_cache import PrefixCache, PrefixHit
from milestone_llm.core.kv import KVEvent
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.request import Request
from milestone_llm.frontend.block_hashes import hash_block
from prefix_helpers import make_cache, prompt, request_of


def allocate(cache: PrefixCache, request: Request) -> tuple[int, list[tuple[int, int]]]:
    """A table for a request with what is cached of it: tokens saved, copies to make."""
    hit = cache.find(request)
    return hit.num_tokens, cache.allocate(request, hit)


def cached(cache: PrefixCache, name: str, token_ids: list[int], **fields: str) -> Request:
    """A request whose tokens are all computed, in a step of its own."""
    request = request_of(name, token_ids, **fields)
    cache.begin_step()
    allocate(cache, request)
    cache.make_findable(request, request.num_tokens)
    cache.begin_step()
    check_invariants(cache)
    return request


def found(cache: PrefixCache, token_ids: list[int], **fields: str) -> tuple[list[int], int]:
    """Blocks and tokens that a newcomer would find."""
    request = request_of("newcomer", token_ids, **fields)
    hit = cache.find(request)
    request.finish("abort")
    cache.release(request)
    return hit.blocks, hit.num_tokens


def has_room(cache: PrefixCache, name: str, token_ids: list[int]) -> bool:
    """Whether a request of this name could be admitted."""
    request = request_of(name, token_ids)
    return cache.can_allocate(request, cache.find(request))


def check_invariants(cache: PrefixCache) -> None:
    cache.kv.check_invariants()
    cache.pool.check_invariants()


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
    cache = make_cache(16)
    cached(cache, "a", prompt("ABC", 1))
    assert found(cache, prompt("ABC", 1))[1] == 12
    for blocks in ("BC", "XBC", "AC", "CBA", "BAC", "AABC"):
        assert found(cache, prompt(blocks, 1))[1] == (4 if blocks[0] == "A" else 0), blocks


def test_every_order_of_the_same_blocks_is_its_own_content():
    cache = make_cache(64)
    for name in map("".join, itertools.permutations("ABC")):
        cached(cache, name, prompt(name, 1))
    # 3 first blocks, 6 pairs, 6 triples.
    assert len(cache.pool.block_of) == 15


def test_salts_keep_tenants_apart_from_the_first_block_on():
    cache = make_cache(16)
    cached(cache, "a", prompt("AB", 1), salt="tenant 1")
    assert found(cache, prompt("AB", 1), salt="tenant 1")[1] == 8
    for salt in ("", "tenant 2", "tenant 1 "):
        assert found(cache, prompt("AB", 1), salt=salt) == ([], 0)


def test_any_text_may_be_a_salt():
    cache = make_cache(16)
    for salt in ("\ud800", "日本", "\0", "a" * 10_000):
        cached(cache, f"r{salt}", prompt("A", 1), salt=salt)
        assert found(cache, prompt("A", 1), salt=salt)[1] == 4


def test_each_block_is_hashed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "m4_prefix_chunked.prefix_cache.hash_block",
        lambda parent, tokens: calls.append(tokens) or hash_block(parent, tokens),
    )
    cache = make_cache(16)
    request = cached(cache, "a", prompt("ABC", 3))
    for _ in range(3):
        cache.find(request)
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
    cache = make_cache(8)
    cached(cache, "a", prompt("AB", 2))
    token_ids = (prompt("AB", 2) + prompt("XY"))[:num_tokens]
    assert found(cache, token_ids) == (cache.kv.block_tables["a"][:num_blocks], num_cached)


def test_the_longest_prefix_is_found_not_a_later_block_after_a_gap():
    cache = make_cache(16)
    cached(cache, "a", prompt("ABC", 1))
    cache.pool.forget(cache.kv.block_tables["a"][1])
    assert found(cache, prompt("ABC", 1)) == (cache.kv.block_tables["a"][:1], 4)


def test_nothing_is_found_or_remembered_or_counted_when_switched_off():
    cache = make_cache(8, is_enabled=False)
    cached(cache, "a", prompt("AB", 1))
    b = cached(cache, "b", prompt("AB", 1))
    assert cache.find(b) == PrefixHit([], 0)
    assert cache.pool.block_of == {}
    assert cache.hashes == {}
    assert set(cache.counts.values()) == {0}


def test_finding_changes_nothing():
    cache = make_cache(8)
    cached(cache, "a", prompt("AB", 1))
    cache.kv.free("a")
    before = (list(cache.pool.free_blocks), list(cache.pool.ref_counts), dict(cache.counts))
    events = list(cache.kv.events)
    assert found(cache, prompt("AB", 1))[1] == 8
    assert has_room(cache, "b", prompt("AB", 1))
    assert (list(cache.pool.free_blocks), cache.pool.ref_counts, cache.counts) == before
    assert cache.kv.events == events


# --- tables -------------------------------------------------------------------------------------


def test_a_hit_shares_the_blocks_of_who_still_runs():
    cache = make_cache(8)
    cached(cache, "a", prompt("AB", 1))
    b = request_of("b", prompt("AB", 3))
    assert allocate(cache, b) == (8, [])
    assert cache.kv.block_tables == {"a": [0, 1, 2], "b": [0, 1, 3]}
    assert cache.kv.events[-2:] == [KVEvent("share", "b", [0, 1]), KVEvent("alloc", "b", [3])]
    check_invariants(cache)


def test_a_hit_revives_free_blocks_before_anything_could_evict_them():
    """Two blocks are free, both cached; the newcomer needs them and one more: not the two."""
    cache = make_cache(3)
    cached(cache, "a", prompt("AB", 1))
    cache.kv.free("a")
    assert list(cache.pool.free_blocks) == [2, 1, 0]
    assert allocate(cache, request_of("b", prompt("AB", 3))) == (8, [])
    assert cache.kv.block_tables["b"] == [0, 1, 2]
    assert (cache.pool.num_evictions, list(cache.pool.block_of.values())) == (0, [0, 1])


def test_a_wholly_cached_prompt_is_written_in_place_where_nobody_reads_it():
    cache = make_cache(8)
    cached(cache, "a", prompt("AB"))
    cache.kv.free("a")
    assert allocate(cache, request_of("b", prompt("AB"))) == (7, [])
    assert cache.kv.block_tables["b"] == [0, 1]
    assert cache.kv.num_copies == 0


def test_a_wholly_cached_prompt_copies_its_last_block_where_somebody_reads_it():
    cache = make_cache(8)
    cached(cache, "a", prompt("AB"))
    b = request_of("b", prompt("AB"))
    assert allocate(cache, b) == (7, [(1, 2)])
    cache.make_findable(b, 8)
    assert cache.kv.block_tables == {"a": [0, 1], "b": [0, 2]}
    assert cache.kv.events[-1] == KVEvent("copy_on_write", "b", [1, 2])
    assert found(cache, prompt("AB", 1))[0] == [0, 1], "the copy is not found, nor merged"
    check_invariants(cache)


def test_the_last_block_of_an_equal_prompt_is_not_copied_before_it_is_written():
    """Copies come before the step's forward, and it is that forward which fills the block."""
    cache = make_cache(8)
    a = request_of("a", prompt("AB"))
    cache.begin_step()
    allocate(cache, a)
    cache.make_findable(a, 8)
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
    cache = make_cache(num_blocks)
    cached(cache, "a", prompt("AB", 1))
    if is_a_free:
        cache.kv.free("a")
    assert has_room(cache, "b", prompt("AB", 3)) == fits
    assert not has_room(cache, "c", prompt("ABXYZ", 3))


def test_room_is_reckoned_with_the_copy_of_the_last_block():
    full, roomy = make_cache(2), make_cache(3)
    for cache in (full, roomy):
        cached(cache, "a", prompt("AB"))
    assert not has_room(full, "b", prompt("AB"))
    assert has_room(roomy, "b", prompt("AB"))
    full.kv.free("a")
    assert has_room(full, "b", prompt("AB")), "in place, if it is free"


# --- what is forgotten --------------------------------------------------------------------------


@pytest.mark.parametrize("is_pending", [True, False])
def test_the_blocks_of_a_request_that_went_wrong_are_found_no_more_and_no_others_lost(is_pending):
    """Also those that another request wrote or uses: what this one read in them was no number."""
    cache = make_cache(12)
    cached(cache, "a", prompt("AB", 1))
    cached(cache, "x", prompt("XY", 1))
    b = request_of("b", prompt("ABCD", 1))
    allocate(cache, b)
    cache.make_findable(b, 17)
    assert found(cache, prompt("ABCD", 1))[1] == 16
    if not is_pending:
        cache.begin_step()
    cache.forget_blocks(b)
    cache.kv.free("b")
    assert found(cache, prompt("ABCD", 1))[1] == 0
    assert found(cache, prompt("XY", 1))[1] == 8
    assert cache.kv.block_tables["a"] == [0, 1, 2], "a keeps its blocks"
    check_invariants(cache)


def test_a_row_makes_only_the_blocks_findable_that_it_completes():
    cache = make_cache(8)
    a = request_of("a", prompt("ABC", 1))
    allocate(cache, a)
    for end, num_found in [(3, 0), (6, 1), (7, 1), (8, 2), (13, 3)]:
        cache.make_findable(a, end)
        assert len(cache.pool.block_of) == num_found, end


def test_a_block_whose_last_token_is_being_sampled_is_found_once_the_token_is_known():
    """The step that writes it may be launched before: a block is found by its tokens."""
    cache = make_cache(8)
    a = request_of("a", prompt("A", 3), 4)
    allocate(cache, a)
    a.num_in_flight = 1
    cache.kv.append("a", 7, 8)
    cache.make_findable(a, 8)
    assert list(cache.pool.block_of.values()) == [0]
    a.append_token(SampledToken(5))
    cache.make_findable(a, 8)
    assert found(cache, [*a.token_ids, 9]) == ([0, 1], 8)


def test_when_all_requests_are_dropped_their_hashes_are():
    """What the pool holds is the pool's to forget."""
    cache = make_cache(8)
    cached(cache, "a", prompt("AB", 1))
    cache.make_findable(cached(cache, "b", prompt("CD")), 8)
    cache.kv.reset()
    cache.reset_requests()
    assert (cache.hashes, cache.num_findable, cache.pending) == ({}, {}, set())
    assert found(cache, prompt("AB", 1)) == ([], 0)
    assert cached(cache, "a", prompt("AB", 1)).num_tokens == 9
    assert found(cache, prompt("AB", 1)) == ([0, 1], 8)


def test_a_finished_requests_hashes_are_dropped_its_blocks_stay():
    cache = make_cache(8)
    a = cached(cache, "a", prompt("AB", 1))
    cache.kv.free("a")
    cache.release(a)
    assert set(cache.hashes) == {"a"}, "it was preempted, and will want them again"
    a.finish("length")
    cache.release(a)
    cache.release(a)
    assert cache.hashes == cache.num_findable == {}
    assert found(cache, prompt("AB", 1))[1] == 8


def test_counts_of_queries_hits_tokens_and_evictions():
    cache = make_cache(4)
    cached(cache, "a", prompt("AB", 1))
    cache.kv.free("a")
    cached(cache, "b", prompt("AB"))
    cache.kv.free("b")
    cached(cache, "c", prompt("XYZ", 1))
    assert cache.kv.events[-3:] == [
        KVEvent("evict", None, [1]),
        KVEvent("evict", None, [0]),
        KVEvent("alloc", "c", [3, 2, 1, 0]),
    ]
    assert cache.stats() == {
        "queries": 3,
        "hits": 1,
        "queried_tokens": 9 + 8 + 13,
        "saved_tokens": 7,
        "evictions": 2,
        "hit_rate": 7 / 30,
    }


@pytest.mark.parametrize("damage", ["block_of", "hash_of", "num_cached_free"])
def test_the_invariant_check_notices_damage(damage):
    cache = make_cache(8)
    cached(cache, "a", prompt("AB", 1))
    cache.kv.free("a")
    check_invariants(cache)
    if damage == "num_cached_free":
        cache.pool.num_cached_free += 1
    else:
        getattr(cache.pool, damage).popitem()
    with pytest.raises(AssertionError):
        check_invariants(cache)
