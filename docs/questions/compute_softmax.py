"""Softmax of eight numbers: with the maximum known, in tiles of two, and in two halves merged.

Each number is a score that belongs to a value; attention is the weighted sum of values.
"""

import math

SCORES = [1.0, 3.0, 2.0, 0.0, 5.0, 1.0, 4.0, 2.0]
VALUES = [10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0]
TILE = 2

top = max(SCORES)  # needs a pass over all scores before the first weight is known
weights = [math.exp(score - top) for score in SCORES]
total = sum(weights)
print("all at once")
print("  score     " + "".join(f"{score:8.3f}" for score in SCORES))
print("  exp(s - 5)" + "".join(f"{weight:8.3f}" for weight in weights))
print("  weight    " + "".join(f"{weight / total:8.3f}" for weight in weights))
expected = sum(w * v for w, v in zip(weights, VALUES, strict=True)) / total
print(f"  output {expected:.6f}")


def attend(first: int, end: int, is_shown: bool = False) -> tuple[float, float]:
    """Compute online softmax over scores `first` to `end - 1`. Returns output and log of the sum of
    exp(score)."""
    row_max, row_sum, output = -math.inf, 0.0, 0.0
    for tile in range(first, end, TILE):
        scores, values = SCORES[tile : tile + TILE], VALUES[tile : tile + TILE]
        new_max = max(row_max, *scores)
        rescale = math.exp(row_max - new_max)  # the sum so far was relative to row_max
        weights = [math.exp(score - new_max) for score in scores]
        row_sum = row_sum * rescale + sum(weights)
        output = output * rescale + sum(w * v for w, v in zip(weights, values, strict=True))
        row_max = new_max
        if is_shown:
            state = f"{row_max:6.1f}{rescale:9.3f}{row_sum:9.3f}{output:10.3f}"
            print(f"  {scores!s:12}{state}{output / row_sum:12.6f}")
    return output / row_sum, row_max + math.log(row_sum)


print("\nonline, in tiles of two")
print("  tile           max  rescale      sum    output  output / sum")
attend(0, 8, is_shown=True)

print("\ntwo halves, each by itself, merged by their log-sum-exp")
halves = [attend(0, 4), attend(4, 8)]
for name, (output, lse) in zip(("first", "second"), halves, strict=True):
    print(f"  {name:7} output {output:9.6f}  lse {lse:.6f}")
top = max(lse for _, lse in halves)
shares = [math.exp(lse - top) for _, lse in halves]
merged = sum(s * output for s, (output, _) in zip(shares, halves, strict=True)) / sum(shares)
print(f"  merged  output {merged:9.6f}")
assert math.isclose(merged, expected)
assert math.isclose(attend(0, 8)[0], expected)
