from __future__ import annotations


def blocks_of_hit(
    num_blocks: int, block_size: int, windows: list[int | None], cached: list[set[int]]
) -> int:
    def has_all(length: int) -> bool:
        for window, own in zip(windows, cached, strict=True):
            first = 0 if window is None else max(0, length * block_size - window + 1)
            if not own.issuperset(range(first // block_size, length)):
                return False
        return True

    return next(length for length in range(num_blocks, -1, -1) if has_all(length))
