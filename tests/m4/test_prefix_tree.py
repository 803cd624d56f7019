"""The prefix cache as a tree in the terminal: who shares what, and what is free but cached."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

import m4_prefix_chunked
from helpers.engines import greedy, make_engine, random_prompts, run_to_end
from m4_prefix_chunked.tools.prefix_tree import pool_in_words, prefix_tree, print_prefix_tree


def tree_of_three() -> tuple[Any, list[Any]]:
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
    return engine, requests


def test_chains_are_collapsed_and_parted_where_requests_part() -> None:
    engine, requests = tree_of_three()
    shared, stranger = prefix_tree(engine.scheduler.kv.prefix_cache, requests)
    assert (shared.blocks, shared.holders, shared.visitors) == ([0, 1], ["r1"], ["r0", "r1"])
    assert [(child.holders, child.visitors) for child in shared.children] == [
        ([], ["r0"]),
        (["r1"], ["r1"]),
    ]
    assert (stranger.holders, len(stranger.blocks)) == (["r2"], 1)
    assert stranger.token_ids == requests[2].token_ids[:4]
    for node in (shared, *shared.children, stranger):
        counts = [engine.scheduler.kv.blocks.pool.ref_counts[block] for block in node.blocks]
        assert counts == [len(node.holders)] * len(counts)


def test_a_tree_without_colour_in_ascii() -> None:
    engine, requests = tree_of_three()
    cache, file = engine.scheduler.kv.prefix_cache, io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    tree = prefix_tree(cache, requests)
    print_prefix_tree(tree, pool_in_words(cache), Console(file=file, width=80))
    file.seek(0)
    lines = [line.rstrip() for line in file]
    assert all(len(line) <= 80 for line in lines)
    assert lines[0].startswith("blocks of 4 tokens: # 5 in use, + 1 free but cached, ")
    assert lines[1].startswith("# 2 blocks: 0 1")
    assert lines[1].endswith("refs 1: r1")
    assert lines[3].startswith("+-- + 1 block: 2")
    assert lines[3].endswith("refs 0, cached, was of r0")
    assert lines[5].startswith("`-- # 1 block: ")


@pytest.mark.parametrize("salts", [("a", "a"), ("a", "b")])
def test_tenants_with_different_salts_have_trees_of_their_own(salts: tuple[str, str]) -> None:
    engine = make_engine(m4_prefix_chunked, block_size=4, max_model_len=32)
    (prompt,) = random_prompts([9])
    for salt in salts:
        engine.add_request(prompt, greedy(4, cache_salt=salt))
    requests = list(engine.requests.values())
    engine.step()
    roots = prefix_tree(engine.scheduler.kv.prefix_cache, requests)
    assert len(roots) == len(set(salts))
