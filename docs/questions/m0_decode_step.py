"""Attention of a prompt and of one decode step after it, drawn: `-o PATH.png`.

Weights are those of one head of SmolLM2-135M's second layer.
"""

import argparse

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from docs.questions.m0_transformer import Model, watch_layers
from milestone_llm.lab.plots.picture import set_titles, write_picture
from milestone_llm.models.checkpoint import load_model

LAYER, HEAD = 1, 4
NEW, CACHED = "#74b3e0", "#3f9c8b"


def box(axes: Axes, x: float, y: float, text: str, fill: str, hatch: str = "", **style) -> None:
    """A unit cell with a text in it."""
    look = {"facecolor": fill, "edgecolor": "#555555", "hatch": hatch, "linewidth": 0.8}
    axes.add_patch(Rectangle((x, y), 1, 0.86, **look))
    axes.text(x + 0.5, y + 0.43, text, ha="center", va="center", **style)


def weight_cell(axes: Axes, x: float, y: float, weight: float) -> None:
    """A cell as dark as its attention weight."""
    shade = str(round(1 - 0.75 * weight, 3))
    box(axes, x, y, f"{weight:.2f}", shade, color="white" if weight > 0.6 else "black")


def draw_prefill(axes: Axes, words: list[str], weights: torch.Tensor) -> None:
    """The triangle of weights of a prompt."""
    set_titles(axes, "Prefill: five tokens, one pass", "a row is a query, a column is a key")
    for row, word in enumerate(words):
        y = 4.4 - row
        axes.text(-0.15, y + 0.43, word, ha="right", va="center")
        axes.text(row + 0.5, 5.45, word, ha="center", va="bottom")
        for column in range(len(words)):
            if column <= row:
                weight_cell(axes, column, y, float(weights[row, column]))
            else:
                box(axes, column, y, "", "white", "////")
    axes.text(
        2.5,
        -0.2,
        "hatched: the causal mask. A token never\nsees a later one, so its keys and\n"
        "values never change: they can be kept.",
        ha="center",
        va="top",
    )


def draw_decode(axes: Axes, words: list[str], weights: torch.Tensor) -> None:
    """One query against the cached keys and its own."""
    set_titles(
        axes, "Decode: one token, one pass", "one query; only the last key and value are computed"
    )
    last = len(words) - 1
    for column, word in enumerate(words):
        is_new = column == last
        fill, kind = (NEW, "new") if is_new else (CACHED, "cached")
        ink = "black" if is_new else "white"
        axes.text(
            column + 0.5,
            5.45,
            word,
            ha="center",
            va="bottom",
            weight="bold" if is_new else "normal",
        )
        box(axes, column, 4.4, kind, fill, color=ink, fontsize=8)
        weight_cell(axes, column, 2.9, float(weights[column]))
        box(axes, column, 1.4, kind, fill, color=ink, fontsize=8)
        for top in (4.4, 2.9):
            axes.annotate(
                "",
                (column + 0.5, top - 0.62),
                (column + 0.5, top - 0.02),
                arrowprops={"arrowstyle": "->", "color": "#555555"},
            )
        axes.plot([column + 0.5, 3], [1.38, 0.82], color="#555555", linewidth=0.8)
    for y, name in ((4.4, "keys"), (2.9, "weights"), (1.4, "values")):
        axes.text(-0.15, y + 0.43, name, ha="right", va="center")
    axes.text(6.15, 4.83, f"x query of\n{words[-1]!r}", va="center")
    axes.text(6.15, 3.33, "softmax:\nsum 1", va="center")
    axes.text(6.15, 1.83, "times weights,\nadded up", va="center")
    box(axes, 2.5, -0.05, "output", "white")


def main() -> None:
    """Compute the weights and draw them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", metavar="PATH.png", required=True)
    options = parser.parse_args()
    loaded = load_model("smollm2-135m", dtype="float32", device="cpu")
    model, token_ids = (
        Model(loaded.model),
        loaded.tokenizer.encode("The capital of France is Paris"),
    )
    words = [loaded.tokenizer.decode([token_id]).strip() for token_id in token_ids]
    prefill = watch_layers(model, token_ids[:-1], None)[LAYER]["weights"][HEAD]
    _, caches = model.forward(token_ids[:-1], None)
    decode = watch_layers(model, token_ids[-1:], caches)[LAYER]["weights"][HEAD, 0]

    def draw() -> Figure:
        figure = Figure(figsize=(10.5, 4.9), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(6, 8))
        draw_prefill(left, words[:-1], prefill)
        draw_decode(right, words, decode)
        for axes, width in ((left, 5), (right, 7.6)):
            axes.set(xlim=(-1.1, width + 0.1), ylim=(-1.3, 6))
            axes.axis("off")
        return figure

    print("wrote", write_picture(options.output, "decode step", draw))


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
