"""Checks exercises/m5_merge_two.py."""

import random

import pytest

from m5_kernels.tools.flash_decode_by_hand import Partial, merge

EXERCISE = ("m5_merge_two.py", "merge_two")


def random_parts(seed, shift=0.0):
    rng = random.Random(seed)
    return [Partial(rng.uniform(-3, 3), shift + rng.uniform(-4, 4)) for _ in range(9)]


def merged_in_random_pairs(merge_two, parts, seed):
    rng, parts = random.Random(seed), list(parts)
    while len(parts) > 1:
        rng.shuffle(parts)
        parts.append(merge_two(parts.pop(), parts.pop()))
    return parts[0]


def test_any_tree_gives_what_one_merge_gives(exercise):
    for seed in range(20):
        parts = random_parts(seed)
        result = merged_in_random_pairs(exercise, parts, seed)
        assert result.output == pytest.approx(merge(parts))


def test_huge_and_tiny_parts_neither_overflow_nor_vanish(exercise):
    for shift in (-2000.0, 2000.0):
        parts = random_parts(3, shift)
        assert merged_in_random_pairs(exercise, parts, 1).output == pytest.approx(merge(parts))


def test_a_plain_average_is_caught():
    def average(left, right):
        return Partial((left.output + right.output) / 2, max(left.lse, right.lse))

    parts = random_parts(0)
    assert merged_in_random_pairs(average, parts, 0).output != pytest.approx(merge(parts))
