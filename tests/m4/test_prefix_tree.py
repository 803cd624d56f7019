"""The prefix cache as a tree in the terminal: who shares what, and what is free but cached."""

from __future__ import annotations

from typing import Any

import pytest

import m4_prefix_chunked
from engine_helpers import greedy, make_engine, random_prompts, run_to_end
from m4_prefix_chunked.tools.prefix_tree import PrefixTree


def tree_of_three() -> tuple[Any, list[Any], PrefixTree]:
    """Two conversations with one beginning, one of them done, and a stranger."""
    engine = make_engine(m4_prefix_chunked, block_size=4, max_model_len=32)
    (shared, own_a, own_b, other) = random_prompts([8, 5, 6, 4])
    engine.add_request(shared + own_a, greedy(2))
    requests = list(engine.requests.values())
    run_to_end(engine)
    engine.add_request(shared + own_b, greedy(8))
    engine.add_request(other, greedy(8))
    requests += list(engine.requests.values())
    engine.step()
    return engine, requests, PrefixTree.of(engine.scheduler.prefix_cache, requests)


def test_chains_are_collapsed_and_parted_where_requests_part() -> None:
    engine, requests, tree = tree_of_three()
    shared, stranger = tree.roots
    assert (shared.blocks, shared.holders, shared.visitors) == ([0, 1], ["r1"], ["r0", "r1"])
    assert [(child.holders, child.visitors) for child in shared.children] == [
        ([], ["r0"]),
        (["r1"], ["r1"]),
    ]
    assert (stranger.holders, len(stranger.blocks)) == (["r2"], 1)
    assert stranger.token_ids == requests[2].token_ids[:4]
    assert tree.num_cached_free == 1
    for node in (shared, *shared.children, stranger):
        counts = [engine.scheduler.kv.pool.ref_counts[block] for block in node.blocks]
        assert counts == [len(node.holders)] * len(counts)


@pytest.mark.parametrize("salts", [("a", "a"), ("a", "b")])
def test_tenants_with_different_salts_have_trees_of_their_own(salts: tuple[str, str]) -> None:
    engine = make_engine(m4_prefix_chunked, block_size=4, max_model_len=32)
    (prompt,) = random_prompts([9])
    for salt in salts:
        engine.add_request(prompt, greedy(4, cache_salt=salt))
    requests = list(engine.requests.values())
    engine.step()
    tree = PrefixTree.of(engine.scheduler.prefix_cache, requests)
    assert len(tree.roots) == len(set(salts))
