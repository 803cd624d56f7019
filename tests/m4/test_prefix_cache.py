"""Names of blocks: which hash it is, and how often it is computed. The rest is in test_rules.py."""

from __future__ import annotations

import hashlib
import struct

import pytest

from m4_prefix_chunked.prefix_cache import hash_block
from scheduler_helpers import Life, prompt, request_of


def test_a_hash_is_sha256_of_parent_and_tokens():
    """Cryptographic, unlike Python's `hash`, and the same in every process."""
    parent = bytes(range(32))
    wanted = hashlib.sha256(parent + struct.pack("=2q", 1, 2)).digest()
    assert hash_block(parent, [1, 2]) == wanted


@pytest.mark.parametrize("salt", ["\ud800", "日本", "\0", "a" * 10_000])
def test_any_text_may_be_a_salt(salt):
    life = Life()
    life.run(request_of("a", prompt("A", 1), salt=salt))
    assert life.cache.find(request_of("b", prompt("A", 1), salt=salt)).num_tokens == 4
    assert life.cache.find(request_of("c", prompt("A", 1), salt="x")).num_tokens == 0


def test_each_block_is_hashed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "m4_prefix_chunked.prefix_cache.hash_block",
        lambda parent, tokens: calls.append(tokens) or hash_block(parent, tokens),
    )
    life = Life(max_num_batched_tokens=5)
    life.run(request_of("a", prompt("ABC", 3)))
    assert calls == [prompt("ABC")[i : i + 4] for i in (0, 4, 8)]
