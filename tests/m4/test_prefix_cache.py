"""Names of blocks: which hash it is, and how often it is computed. The rest is in test_rules.py."""

from __future__ import annotations

import hashlib
import struct

from helpers.schedulers import Life, prompt, request_of
from milestone_llm.core.block_hashes import hash_block


def test_a_hash_is_sha256_of_parent_and_tokens():
    """Cryptographic, unlike Python's `hash`, and the same in every process."""
    parent = bytes(range(32))
    wanted = hashlib.sha256(parent + struct.pack("=2q", 1, 2)).digest()
    assert hash_block(parent, [1, 2]) == wanted


def test_each_block_is_hashed_once(monkeypatch):
    calls = []
    monkeypatch.setattr(
        "m4_prefix_chunked.prefix_cache.hash_block",
        lambda parent, tokens: calls.append(tokens) or hash_block(parent, tokens),
    )
    life = Life(max_num_batched_tokens=5)
    life.run(request_of("a", prompt("ABC", 3)))
    assert calls == [prompt("ABC")[i : i + 4] for i in (0, 4, 8)]
    assert not life.cache.hashes, "of requests that have ended"
