"""Names of the beginnings of a prompt, for who compares prompts from outside an engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256


def block_names(token_ids: Sequence[int], block_size: int, cache_salt: str = "") -> list[bytes]:
    """A name for each full block, the first block's first: equal where all up to there is equal.

    Args:
        block_size: tokens of a block.
        cache_salt: prompts with different ones have no equal names.
    """
    so_far, names = sha256(repr(cache_salt).encode()), []
    for end in range(block_size, len(token_ids) + 1, block_size):
        so_far.update(array("q", token_ids[end - block_size : end]))
        names.append(so_far.digest())
    return names
