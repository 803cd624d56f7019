"""Checks exercises/m5_merge_two.py."""

import math
import random

import pytest

from docs.questions.flash_decode_by_hand import Partial, merge

EXERCISE = ("m5_merge_two.py", "merge_two")
NUM_TREES = 20


def random_parts(seed, shift=0.0):
    rng = random.Random(seed)
    return [Partial(rng.uniform(-3, 3), shift + rng.uniform(-4, 4)) for _ in range(9)]


def merged_in_random_pairs(merge_two, parts, seed):
    rng, parts = random.Random(seed), list(parts)
    while len(parts) > 1:
        rng.shuffle(parts)
        parts.append(merge_two(parts.pop(), parts.pop()))
    return parts[0]


def num_right(merge_two):
    """In how many of twenty random trees the result is that of one merge."""
    results = [
        merged_in_random_pairs(merge_two, random_parts(seed), seed).output
        for seed in range(NUM_TREES)
    ]
    wanted = [merge(random_parts(seed)) for seed in range(NUM_TREES)]
    return sum(a == pytest.approx(b) for a, b in zip(results, wanted, strict=True))


def check_two_parts(merge_two):
    left, right = Partial(1.0, 3.0), Partial(5.0, 1.0)  # sums of exponentials 8 and 2
    result = merge_two(left, right)
    assert result.output == pytest.approx(1.8), (
        f"outputs 1 and 5 with sums of exponentials 8 and 2 make (8 * 1 + 2 * 5) / 10 = 1.8, "
        f"yours is {result.output}"
    )
    assert result.lse == pytest.approx(math.log2(10)), (
        f"sums of exponentials 8 and 2 make 10, so lse is log2(10) = {math.log2(10):.3f}, "
        f"yours is {result.lse:.3f}: merged again, the part would have the wrong weight"
    )


def check_huge_and_tiny_parts(merge_two):
    for shift in (-2000.0, 2000.0):
        parts = random_parts(3, shift)
        try:
            output = merged_in_random_pairs(merge_two, parts, 1).output
        except (OverflowError, ZeroDivisionError) as error:
            raise AssertionError(
                f"parts with lse near {shift:.0f}: {error!r}. Subtract the larger lse before you "
                "raise 2 to a power."
            ) from None
        assert output == pytest.approx(merge(parts)), f"parts with lse near {shift:.0f}"


def average(left, right):
    return Partial((left.output + right.output) / 2, max(left.lse, right.lse))


def test_two_parts(exercise):
    check_two_parts(exercise)


def test_any_tree_gives_what_one_merge_gives(exercise, figure):
    right = num_right(exercise)
    figure("trees with the right result", f"{right} of {NUM_TREES}", f"{num_right(average)}")
    assert right == NUM_TREES


def test_huge_and_tiny_parts_neither_overflow_nor_vanish(exercise):
    check_huge_and_tiny_parts(exercise)


def test_a_plain_average_is_caught():
    with pytest.raises(AssertionError, match=r"= 1.8, yours is 3.0"):
        check_two_parts(average)


def test_a_part_that_carries_the_larger_sum_only_is_caught():
    def forgetful(left, right):
        return Partial(merge([left, right]), max(left.lse, right.lse))

    with pytest.raises(AssertionError, match="merged again, the part would have the wrong weight"):
        check_two_parts(forgetful)


def test_powers_of_the_bare_lse_are_caught():
    def bare(left, right):
        weights = 2.0**left.lse, 2.0**right.lse
        output = (weights[0] * left.output + weights[1] * right.output) / sum(weights)
        return Partial(output, math.log2(sum(weights)))

    check_two_parts(bare)
    with pytest.raises(AssertionError, match="Subtract the larger lse"):
        check_huge_and_tiny_parts(bare)
