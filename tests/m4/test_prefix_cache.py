"""Names of blocks: which hash it is, and how often it is computed. The rest is in test_rules.py."""

from __future__ import annotations

import hashlib
import struct

import pytest

from m4_prefix_chunked.prefix_cache import hash_block
from prefix_helpers import make_cache, prompt, request_of


def test_a_hash_is_sha256_of_parent_and_tokens():
    """Cryptographic, unlike Python's `hash`, and the same in every process."""
    parent = bytes(range(32))
    wanted = hashlib.sha256(parent + struct.pack("=2q", 1, 2)).digest()
    assert hash_block(parent, [1, 2]) == wanted


@pytest.mark.parametrize("salt", ["\ud800", "日本", "\0", "a" * 10_000])
def test_any_text_may_be_a_salt(salt):
    cache = make_cache(4)
    a = request_of("a", prompt("A", 1), salt=salt)
    cache.allocate(a, cache.find(a))
    cache.make_findable(a, 5)
    assert cache.find(a).num_tokens == 4


def test_each_block_is_hashed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "m4_prefix_chunked.prefix_cache.hash_block",
        lambda parent, tokens: calls.append(tokens) or hash_block(parent, tokens),
    )
    cache, request = make_cache(16), request_of("a", prompt("ABC", 3))
    cache.allocate(request, cache.find(request))
    cache.make_findable(request, request.num_tokens)
    for _ in range(3):
        cache.find(request)
    assert calls == [prompt("ABC")[i : i + 4] for i in (0, 4, 8)]
