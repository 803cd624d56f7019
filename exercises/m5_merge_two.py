"""M5: merge two parts of an attention into one part, so that parts can be merged in a tree.

`merge` in docs/questions/flash_decode_by_hand.py takes all parts and gives the final output:
one program has to wait for all others. With a function that makes one part of two, programs could
merge in pairs, as in a tournament. What must the result carry, so that it can be merged again?

1. Merging all parts in any order and in any pairs gives what `merge` gives.
2. It works for parts whose log-sum-exp is 2000 or -2000, where `2.0 ** lse` is no number.

    python -m pytest tests/exercises/test_m5_merge_two.py
"""

from __future__ import annotations

from docs.questions.flash_decode_by_hand import Partial


def merge_two(left: Partial, right: Partial) -> Partial:
    """The part that covers what both cover: its normalised output and its log-sum-exp (log2).

    Hint: weigh each output by 2 ** (its lse - the larger lse). The sum of the weights, times
    2 ** (the larger lse), is the sum of exponentials of the new part.
    """
    raise NotImplementedError
