"""One layer on two GPUs: which part of each matrix a rank has. `-o PATH.png` draws it."""

import argparse

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle

from milestone_llm.lab.plots.picture import set_titles, write_picture

OWN, OTHER, WHOLE, SUM = "#74b3e0", "#f4f4f4", "#c9c9c9", "#e8a13a"
EDGE = "#333333"

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png", default="m5_cut.png")


def matrix(axes: Axes, x: float, y: float, name: str, rank: int, by_rows: bool) -> None:
    """A weight as `x @ W` reads it, with this rank's half filled."""
    for half in (0, 1):
        is_own = half == rank
        place = (x, y + 0.9 * (1 - half)) if by_rows else (x + 0.7 * half, y)
        size = (1.4, 0.9) if by_rows else (0.7, 1.8)
        fill = {"facecolor": OWN, "hatch": "//"} if is_own else {"facecolor": OTHER}
        axes.add_patch(Rectangle(place, *size, edgecolor=EDGE, linewidth=0.8, **fill))
    axes.text(x + 0.7, y + 2.0, name, ha="center", fontsize=8.5)


def box(axes: Axes, x: float, y: float, width: float, text: str, color: str) -> None:
    """A step that is no matrix product."""
    axes.add_patch(Rectangle((x, y + 0.45), width, 0.9, facecolor=color, edgecolor=EDGE, lw=0.8))
    axes.text(x + width / 2, y + 0.9, text, ha="center", va="center", fontsize=8.5)


def arrow(axes: Axes, start: float, end: float, y: float) -> None:
    """From one step to the next."""
    axes.add_patch(
        FancyArrowPatch(
            (start, y + 0.9), (end, y + 0.9), arrowstyle="-|>", mutation_scale=8, lw=0.8
        )
    )


def draw() -> Figure:
    """Two ranks, one above the other; the all-reduces join them."""
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    axes = figure.subplots()
    for rank in (0, 1):
        y = 3.4 * (1 - rank)
        axes.text(-0.25, y + 0.9, f"rank {rank}", ha="right", va="center", fontsize=10)
        box(axes, 0, y, 1.2, "hidden", WHOLE)
        matrix(axes, 1.7, y, "QKV", rank, by_rows=False)
        box(axes, 3.6, y, 1.5, "own heads:\nattention", "white")
        matrix(axes, 5.6, y, "output", rank, by_rows=True)
        box(axes, 8.5, y, 1.2, "hidden", WHOLE)
        matrix(axes, 10.2, y, "gate, up", rank, by_rows=False)
        box(axes, 12.1, y, 1.5, "own neurons:\nSiLU * mul", "white")
        matrix(axes, 14.1, y, "down", rank, by_rows=True)
        box(axes, 17.0, y, 1.2, "hidden", WHOLE)
        joints = [1.2, 1.7, 3.1, 3.6, 5.1, 5.6, 7.0, 7.4, 8.1, 8.5]
        joints += [9.7, 10.2, 11.6, 12.1, 13.6, 14.1, 15.5, 15.9, 16.6, 17.0]
        for start, end in zip(joints[::2], joints[1::2], strict=True):
            arrow(axes, start, end, y)
    for x in (7.4, 15.9):
        axes.add_patch(Rectangle((x, 0.2), 0.7, 4.85, facecolor=SUM, edgecolor=EDGE, lw=0.8))
        axes.text(x + 0.35, 2.6, "all-reduce + norm", rotation=90, ha="center", va="center")
    set_titles(
        axes,
        "One layer on two GPUs",
        "Hatched: the half of a matrix that a rank has. QKV and gate-up are cut by column, output "
        "and down by row. Only the all-reduces need the other rank.",
    )
    axes.set(xlim=(-1.4, 18.4), ylim=(-0.2, 5.9))
    axes.axis("off")
    return figure


print("wrote", write_picture(parser.parse_args().output, "picture of a layer", draw))
