"""RoPE: does the score of two tokens depend on more than their distance? `-o PATH.png` draws it."""

import argparse

import torch
from matplotlib.figure import Figure

from docs.questions.m0_transformer import rotate
from milestone_llm.lab.plots.picture import set_titles, write_picture

HEAD_DIM, THETA = 64, 10_000.0

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png")
options = parser.parse_args()

torch.manual_seed(0)
query, key = torch.randn(2, 1, 1, HEAD_DIM).unbind()


def score(query_at: int, key_at: int) -> float:
    """Product of one query and one key, turned by their positions."""
    return float((rotate(query, query_at, THETA) * rotate(key, key_at, THETA)).sum())


def draw() -> Figure:
    """What one pair of numbers sees of the distance, for fast and slow pairs; all speeds."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    distance = torch.arange(0, 200)
    for pair, line, width in ((0, ":", 1.0), (8, "--", 1.3), (16, "-.", 1.6), (24, "-", 2.2)):
        speed = THETA ** (-pair / (HEAD_DIM // 2))
        left.plot(
            distance,
            (distance * speed).cos(),
            line,
            linewidth=width,
            color="black",
            label=f"pair {pair}",
        )
    set_titles(
        left,
        "What a pair contributes",
        "cosine of (distance x speed): fast pairs see near, slow pairs far",
    )
    left.set(xlabel="distance between the two tokens", ylabel="cosine of the angle")
    left.legend(loc="lower left", ncols=4, framealpha=1)
    left.set_ylim(-1.75, 1.1)
    pairs = torch.arange(HEAD_DIM // 2)
    right.semilogy(
        pairs,
        2 * torch.pi * THETA ** (pairs / (HEAD_DIM // 2)),
        "o-",
        color="#08519c",
        markersize=3,
    )
    set_titles(right, "Tokens for one full turn", "from 6 to some 47,000")
    right.set(xlabel="pair of a head of 64 numbers", ylabel="tokens")
    return figure


if options.output:
    print("wrote", write_picture(options.output, "picture of RoPE", draw))
else:
    print("distance   positions and the score of the same query and key at them")
    for distance in (0, 1, 7):
        places = [(at + distance, at) for at in (0, 5, 100, 1000)]
        print(f"{distance:8}   " + "  ".join(f"{q},{k}: {score(q, k):.3f}" for q, k in places))
