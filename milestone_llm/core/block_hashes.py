"""Names of the blocks that a prompt fills: chained hashes. Equal names mean equal beginnings.

A prefix cache finds blocks by their names (m4_prefix_chunked). A trace and a router see prompts
from outside an engine, and compare them by the same names.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence


def hash_salt(cache_salt: str) -> bytes:
    """Return the parent of a first block: prompts with different salts have no block in common."""
    return hashlib.sha256(cache_salt.encode("utf-8", "surrogatepass")).digest()


def hash_block(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the SHA-256 of a full block's tokens and of all blocks before it."""
    return hashlib.sha256(parent + array("q", token_ids).tobytes()).digest()


def hash_blocks(token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[bytes]:
    """Return the names of all full blocks of a prompt, the first block's first.

    Args:
        block_size: tokens in a block.
    """
    hashes, parent = [], hash_salt(cache_salt)
    for first in range(0, len(token_ids) - block_size + 1, block_size):
        parent = hash_block(parent, token_ids[first : first + block_size])
        hashes.append(parent)
    return hashes
