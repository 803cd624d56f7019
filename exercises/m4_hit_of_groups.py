"""M4: how long is a prefix hit when layers are in groups?

A prompt has full blocks 0, 1, 2 ... For each group of layers, `cached` says which of them can still
be found. A group that sees all tokens needs every block of the hit. A group with a window needs
only what the first token after the hit sees: the last `window - 1` tokens of the hit.

Return the number of blocks of the longest hit.

    blocks of 4     group 0 sees all: {0, 1, 2, 3}     group 1 sees 6: {0, 2}
    4 blocks: token 16 sees 11..15, in blocks 2 and 3    3 is missing
    3 blocks: token 12 sees 7..11, in blocks 1 and 2     1 is missing
    2 blocks: token 8 sees 3..7, in blocks 0 and 1       1 is missing
    1 block: token 4 sees 0..3, in block 0               so the hit is 1

    python -m pytest tests/exercises/test_m4_hit_of_groups.py
"""

from __future__ import annotations


def blocks_of_hit(
    num_blocks: int, block_size: int, windows: list[int | None], cached: list[set[int]]
) -> int:
    """Return how many blocks the longest hit has.

    Hint: begin with all blocks, and take one away until every group has what it needs.

    Args:
        num_blocks: full blocks of the prompt.
        windows: of each group; None: it sees all tokens.
        cached: for each group, the blocks that can be found.
    """
    raise NotImplementedError
