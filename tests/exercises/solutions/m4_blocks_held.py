from __future__ import annotations


def blocks_held(start: int, window: int | None, block_size: int) -> int:
    first = 0 if window is None else max(0, start - window + 1)
    return start // block_size - first // block_size + 1
