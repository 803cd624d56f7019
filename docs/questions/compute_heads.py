"""MHA, GQA and MQA: bytes of KV for the same query heads. `-o PATH.png` draws who shares what."""

import argparse

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from milestone_llm.lab.plots.picture import set_titles, write_picture

KINDS = {
    "MHA": (8, "a KV head for each query head"),
    "GQA": (2, "four share one: a quarter of the KV"),
    "MQA": (1, "all share one: an eighth of the KV"),
}
"""KV heads of the drawing, for eight query heads."""

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png")
options = parser.parse_args()


def draw() -> Figure:
    """Eight query heads, and the KV heads that each of them reads."""
    figure = Figure(figsize=(10, 2.7), layout="constrained")
    panels = figure.subplots(1, 3)
    for axes, (kind, (num_kv_heads, subtitle)) in zip(panels, KINDS.items(), strict=True):
        group = 8 // num_kv_heads
        for head in range(8):
            axes.add_patch(
                Rectangle((head + 0.1, 2), 0.8, 0.7, facecolor="#74b3e0", edgecolor="black")
            )
            axes.text(head + 0.5, 2.35, f"Q{head}", ha="center", va="center", fontsize=8)
            centre = (head // group + 0.5) * group
            axes.plot([head + 0.5, centre], [2, 0.8], color="#555555", linewidth=1)
        for head in range(num_kv_heads):
            centre = (head + 0.5) * group
            axes.add_patch(
                Rectangle((centre - 0.4, 0.1), 0.8, 0.7, facecolor="#3f9c8b", edgecolor="black")
            )
            axes.text(
                centre, 0.45, f"KV{head}", ha="center", va="center", fontsize=7.5, color="white"
            )
        set_titles(axes, kind, subtitle)
        axes.set(xlim=(0, 8), ylim=(0, 2.9))
        axes.axis("off")
    return figure


if options.output:
    print("wrote", write_picture(options.output, "picture of heads", draw))
else:
    print("KV of one token, head_dim 128, 2 bytes a number: 2 x layers x KV heads x 128 x 2")
    print("                     query heads   KV heads  bytes per token   tokens in 10 GiB")
    for name, layers, query_heads, kv_heads in (
        ("Qwen3-0.6B's (GQA)", 28, 16, 8),
        ("  the same, MHA", 28, 16, 16),
        ("  the same, MQA", 28, 16, 1),
        ("Qwen3-8B's (GQA)", 36, 32, 8),
        ("  the same, MHA", 36, 32, 32),
    ):
        num_bytes = 2 * layers * kv_heads * 128 * 2
        print(f"{name:21}{query_heads:11}{kv_heads:11}{num_bytes:17,}{10 * 2**30 // num_bytes:19,}")
