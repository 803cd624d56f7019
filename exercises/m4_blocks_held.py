"""M4: how many blocks does a request hold in each group of layers?

Some layers see all tokens, others the last `window`, themselves included. A request computes one
token a step. Before it computes token `start` (counted from 0), it gives back every block that no
token from `start` on sees, and takes the block in which `start` is.

Return how many blocks it holds in a group while token `start` is computed.

    window 6, block_size 4, start 9     it sees 4..9: blocks 1 and 2, so 2

    python -m pytest tests/exercises/test_m4_blocks_held.py
"""

from __future__ import annotations


def blocks_held(start: int, window: int | None, block_size: int) -> int:
    """Return the number of blocks in one group.

    Hint: first find the block of the first token that is seen, then the block of `start`.

    Args:
        window: tokens that a token sees; None: all before it, and itself.
    """
    raise NotImplementedError
