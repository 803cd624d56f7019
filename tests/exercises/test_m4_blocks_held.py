"""Checks exercises/m4_blocks_held.py."""

import pytest

from helpers.schedulers import Life, of_length
from m4_prefix_chunked.config import EngineConfig
from m4_prefix_chunked.hybrid.hybrid_cache import grouped_scheduler
from m4_prefix_chunked.hybrid.layer_groups import LayerGroups
from m4_prefix_chunked.scheduler import Scheduler
from milestone_llm.core.kv import NULL_BLOCK

EXERCISE = ("m4_blocks_held.py", "blocks_held")


def WRONG(start, window, block_size):  # noqa: N802
    """Count the blocks that a window takes, wherever it begins."""
    num_seen = start + 1 if window is None else min(start + 1, window)
    return -(-num_seen // block_size)


TOLD = "may begin inside a block"


@pytest.mark.parametrize(("window", "block_size"), [(6, 4), (5, 4), (3, 2), (8, 4), (1, 4)])
def test_it_says_what_the_manager_holds(exercise, window, block_size):
    groups = LayerGroups((None, window), ((0,), (1,)))
    config = EngineConfig(block_size=block_size, max_num_seqs=1)
    life = Life(scheduler=grouped_scheduler(Scheduler, config, 48, 80, groups))
    life.device.windows = groups.windows
    life.add(of_length("a", 1, max_tokens=30))
    while life.scheduler.has_unfinished_requests():
        (row,) = life.plan().rows
        for own, table in zip(groups.windows, row.group_blocks, strict=True):
            held = sum(block != NULL_BLOCK for block in table)
            given = exercise(row.start, own, block_size)
            assert given == held, (
                f"token {row.start}, window {own}, blocks of {block_size}: {held} are held, not "
                f"{given}. A window may begin inside a block."
            )
