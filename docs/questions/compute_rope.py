"""RoPE: does the score of two tokens depend on more than their distance?"""

import torch

from docs.questions.m0_transformer import rotate

torch.manual_seed(0)
query, key = torch.randn(2, 1, 1, 64).unbind()


def score(query_at: int, key_at: int) -> float:
    """Return the product of one query and one key, each rotated by its position."""
    return float((rotate(query, query_at, 1e4) * rotate(key, key_at, 1e4)).sum())


print("distance   positions and the score of the same query and key at them")
for distance in (0, 1, 7):
    places = [(at + distance, at) for at in (0, 5, 100, 1000)]
    print(f"{distance:8}   " + "  ".join(f"{q},{k}: {score(q, k):.3f}" for q, k in places))
