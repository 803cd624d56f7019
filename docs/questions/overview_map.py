"""The concepts of all chapters and what each of them needs, drawn: `-o PATH.png`."""

import argparse

from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from milestone_llm.lab.plots.picture import write_picture

LANES = ["M0", "compute", "M1", "M2", "M3", "M4", "M5", ""]
CONCEPTS = {
    # name: (column, lane, the conflict that it resolves)
    "KV cache": (1, 0, "old tokens are not\ncomputed again"),
    "one token at a time": (2, 0, "each token needs\nall before it"),
    "attention": (3, 0, "a query meets\nall keys"),
    "GQA": (0, 1, "less KV: heads\nshare it"),
    "online softmax, tiles": (4, 1, "no N x N matrix\nin memory"),
    "static batch": (2, 2, "rows share one\nread of the weights"),
    "Gumbel-max, Philox": (5, 2, "a token without a sum,\nthe same in any batch"),
    "a region a request": (1, 3, "rows come and go\nalone"),
    "continuous batching": (2, 3, "no idle rows,\nno waiting for a batch"),
    "flat rows": (3, 3, "rows of any length\nin one step"),
    "copy-on-write": (0, 4, "shared, until\nsomebody writes"),
    "blocks, block tables": (1, 4, "no memory kept\nfor the longest case"),
    "preemption": (2, 4, "memory runs out,\nnobody is dropped"),
    "prefix cache": (0, 5, "equal beginnings\nare computed once"),
    "chunked prefill": (3, 5, "a long prompt\nstops nobody"),
    "state on the GPU": (1, 6, "a step sends only\nwhat changed"),
    "Flash-Decoding": (4, 6, "a few long rows\nfill the GPU"),
    "fused kernels": (5, 6, "norms, RoPE, sampling:\nfewer trips to memory"),
    "pipelined steps": (2, 7, "the GPU does not\nwait for Python"),
    "CUDA graphs": (4, 7, "one launch\na step"),
    "tensor parallelism": (5, 7, "one GPU is\ntoo small"),
}
NEEDS = [
    ("one token at a time", "attention"),
    ("KV cache", "one token at a time"),
    ("GQA", "KV cache"),
    ("online softmax, tiles", "attention"),
    ("static batch", "one token at a time"),
    ("a region a request", "KV cache"),
    ("continuous batching", "static batch"),
    ("a region a request", "continuous batching"),
    ("flat rows", "continuous batching"),
    ("flat rows", "attention"),
    ("blocks, block tables", "a region a request"),
    ("copy-on-write", "blocks, block tables"),
    ("preemption", "blocks, block tables"),
    ("preemption", "continuous batching"),
    ("prefix cache", "copy-on-write"),
    ("prefix cache", "blocks, block tables"),
    ("chunked prefill", "flat rows"),
    ("state on the GPU", "blocks, block tables"),
    ("Flash-Decoding", "online softmax, tiles"),
    ("Flash-Decoding", "state on the GPU"),
    ("fused kernels", "Gumbel-max, Philox"),
    ("CUDA graphs", "Flash-Decoding"),
    ("CUDA graphs", "fused kernels"),
    ("CUDA graphs", "state on the GPU"),
    ("pipelined steps", "CUDA graphs"),
    ("pipelined steps", "state on the GPU"),
    ("tensor parallelism", "fused kernels"),
]
"""Arrows go from what is needed to what needs it."""
WIDTH, HEIGHT, COLUMN, LANE = 1.84, 0.74, 2.3, 1.15


def centre(name: str) -> tuple[float, float]:
    """Where a concept's box lies."""
    column, lane, _ = CONCEPTS[name]
    return column * COLUMN, -lane * LANE


def draw() -> Figure:
    """Lanes, boxes, arrows."""
    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots()
    for lane, name in enumerate(LANES):
        shade = "#f1f1f1" if lane % 2 == 0 or lane == len(LANES) - 1 else "#ffffff"
        axes.add_patch(
            Rectangle((-2.2, -(lane + 0.5) * LANE), 14.95, LANE, facecolor=shade, zorder=0)
        )
        axes.text(-2.1, -lane * LANE, name, fontsize=12, fontweight="bold", va="center")
    boxes = {}
    for name, (_, _, resolves) in CONCEPTS.items():
        x, y = centre(name)
        look = {"facecolor": "white", "edgecolor": "#08519c", "linewidth": 1.4, "zorder": 3}
        corner = (x - WIDTH / 2, y - HEIGHT / 2)
        boxes[name] = FancyBboxPatch(corner, WIDTH, HEIGHT, boxstyle="round,pad=0.02", **look)
        axes.add_patch(boxes[name])
        axes.text(
            x, y + 0.21, name, ha="center", va="center", fontsize=9.5, fontweight="bold", zorder=4
        )
        axes.text(
            x, y - 0.13, resolves, ha="center", va="center", fontsize=8, zorder=4, linespacing=1.05
        )
    look = {"arrowstyle": "-|>", "mutation_scale": 13, "color": "#444444", "linewidth": 1.2}
    for name, needed in NEEDS:
        ends = {"patchA": boxes[needed], "patchB": boxes[name], "shrinkA": 0, "shrinkB": 1}
        axes.add_patch(FancyArrowPatch(centre(needed), centre(name), zorder=2, **ends, **look))
    axes.set(xlim=(-2.2, 12.75), ylim=(-8.65, 0.6))
    axes.axis("off")
    return figure


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png", required=True)
print("wrote", write_picture(parser.parse_args().output, "map", draw))
