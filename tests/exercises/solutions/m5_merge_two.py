from __future__ import annotations

import math

from docs.questions.flash_decode_by_hand import Partial


def merge_two(left: Partial, right: Partial) -> Partial:
    top = max(left.lse, right.lse)
    weights = 2 ** (left.lse - top), 2 ** (right.lse - top)
    total = sum(weights)
    output = (weights[0] * left.output + weights[1] * right.output) / total
    return Partial(output, top + math.log2(total))
