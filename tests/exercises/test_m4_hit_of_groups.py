"""Checks exercises/m4_hit_of_groups.py."""

import random

from helpers.schedulers import Life, prompt, request_of
from m4_prefix_chunked.config import EngineConfig
from m4_prefix_chunked.hybrid.hybrid_cache import grouped_scheduler
from m4_prefix_chunked.hybrid.layer_groups import LayerGroups
from m4_prefix_chunked.scheduler import Scheduler

EXERCISE = ("m4_hit_of_groups.py", "blocks_of_hit")


def WRONG(num_blocks, block_size, windows, cached):  # noqa: N802
    """Ask every group for every block."""
    found = (n for n in range(num_blocks) if not all(n in own for own in cached))
    return next(found, num_blocks)


TOLD = "needs only what the token after the hit sees"


def test_the_example(exercise):
    given = exercise(4, 4, [None, 6], [{0, 1, 2, 3}, {0, 2}])
    assert given == 1, f"the hit of the example has 1 block, not {given}"


def test_it_finds_what_the_prefix_cache_finds(exercise):
    rng = random.Random(0)
    for _ in range(60):
        windows = (None, *rng.sample(range(2, 14), rng.choice((1, 2))))
        groups = LayerGroups(windows, tuple((layer,) for layer in range(len(windows))))
        life = Life(
            scheduler=grouped_scheduler(Scheduler, EngineConfig(block_size=4), 60, 90, groups)
        )
        life.device.windows = windows
        life.run(request_of("a", prompt("ABCDEF", 1)))
        asked = request_of("b", prompt("ABCDEF", 2))
        cached = [set(range(6)) for _ in windows]
        for group, own in enumerate(cached):
            for block in rng.sample(range(6), rng.choice((0, 0, 1, 2))):
                own.discard(block)
                life.cache.pool.forget(life.cache._block(asked, group, block))
        right = life.cache.find(asked).num_tokens // 4
        given = exercise(6, 4, list(windows), cached)
        assert given == right, (
            f"windows {windows}, cached {cached}: the hit has {right} blocks, not {given}. A group "
            "with a window needs only what the token after the hit sees."
        )
