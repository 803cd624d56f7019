"""The milestones keep the rules of their courses: the steps of `exercises/build` are their tests.

A step is traffic or a few calls, what must come of them, and why. It is told in the same words to
whoever writes the part (`python -m exercises.build m3`) and to whoever has broken it here.
"""

from __future__ import annotations

import importlib
import re

import pytest

from exercises.build.check import Course, Parts, problem
from exercises.build.device import Ask
from m3_paged.block_manager import BlockManager
from m3_paged.block_pool import BlockPool
from m4_prefix_chunked.caching_pool import CachingBlockPool

MILESTONES = {"m2": "m2_batching", "m3": "m3_paged", "m4": "m4_prefix_chunked"}
COURSES = {name: Course.named(name) for name in MILESTONES}
STEPS = [
    pytest.param(name, step, id=f"{name}: {step.title}")
    for name, course in COURSES.items()
    for step in course.steps
    if not step.needs_model  # tests of the engines serve models
]


@pytest.mark.parametrize(("course", "step"), STEPS)
def test_a_milestone_keeps_the_rule(course, step):
    if found := problem(step, Parts(MILESTONES[course])):
        pytest.fail(found, pytrace=False)


@pytest.mark.parametrize("course", MILESTONES)
@pytest.mark.parametrize(
    ("limits", "numbers"),
    [
        ({"max_num_seqs": 1}, ["1"]),
        (
            {"max_num_seqs": 2, "max_num_batched_tokens": 6},
            ["5", "2"],
        ),  # tokens: b needs 5, and 2 are left
    ],
)
def test_a_milestone_says_in_numbers_why_a_request_waits(course, limits, numbers):
    """A reader's scheduler may say it in any words."""
    package = importlib.import_module(MILESTONES[course])
    memory = {"m2": (), "m3": (8,), "m4": (8,)}[course]
    more = {} if course == "m2" else {"block_size": 4}
    more |= {"enable_chunked_prefill": False} if course == "m4" else {}
    config = package.EngineConfig(**limits, **more)
    scheduler = Parts(MILESTONES[course]).Scheduler(config, 6, *memory)
    for name, num_tokens in (("a", 4), ("b", 5)):
        scheduler.add(*Ask(name, num_tokens).requests(0, 16))
    assert set(re.findall(r"\d+", scheduler.schedule().waiting_reasons["b"])) == set(numbers)


# --- the checks that the rules and `check_invariants=True` rely on --------------------------------


def lose_a_block(manager: BlockManager) -> None:
    manager.pool.ref_counts[manager.pool.allocate()] = 0


def take_a_block_without_a_table(manager: BlockManager) -> None:
    manager.pool.allocate()


def count_a_sharer_too_many(manager: BlockManager) -> None:
    manager.pool.share(0)


def free_a_block_in_use(manager: BlockManager) -> None:
    manager.pool.free(0)
    manager.pool.ref_counts[0] = 1
    lose_a_block(manager)  # so that the sum is right again


@pytest.mark.parametrize(
    "damage",
    [lose_a_block, take_a_block_without_a_table, count_a_sharer_too_many, free_a_block_in_use],
)
def test_the_check_of_block_tables_notices_damage(damage):
    manager = BlockManager(BlockPool(4), 4, events=[])
    manager.allocate("a", 6)
    manager.check_invariants()
    damage(manager)
    with pytest.raises(AssertionError):
        manager.check_invariants()
    manager.reset()  # in whatever state the books are
    manager.check_invariants()


@pytest.mark.parametrize("damage", ["block_of", "hash_of", "num_cached_free"])
def test_the_check_of_cached_blocks_notices_damage(damage):
    pool = CachingBlockPool(2, events=[])
    pool.remember(pool.allocate(), b"h")
    pool.free(0)
    pool.check_invariants()
    if damage == "num_cached_free":
        pool.num_cached_free += 1
    else:
        getattr(pool, damage).popitem()
    with pytest.raises(AssertionError):
        pool.check_invariants()
