"""Small pictures of one idea each: `python -m docs.questions.small_pictures rope -o PATH.png`"""

import argparse
import math
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle

from milestone_llm.lab.plots.picture import set_titles, write_picture

OWN, READ, PLAIN, EDGE = "#74b3e0", "#e3eef6", "#ffffff", "#333333"


def box(axes: Axes, x: float, y: float, text: str, color: str = PLAIN, width: float = 1.6) -> None:
    """A box with a text, by the middle of its left side."""
    axes.add_patch(Rectangle((x, y - 0.4), width, 0.8, facecolor=color, edgecolor=EDGE, lw=0.9))
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=9)


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], style="-|>") -> None:
    """From one place to another."""
    look = {"arrowstyle": style, "mutation_scale": 9, "lw": 1.0, "color": EDGE}
    axes.add_patch(FancyArrowPatch(start, end, shrinkA=0, shrinkB=0, **look))


def prefill_decode() -> Figure:
    """Positions that each of four steps computes and reads."""
    figure = Figure(figsize=(8.4, 2.9), layout="constrained")
    axes = figure.subplots()
    num_prompt = 6
    for step in range(4):
        first = 0 if step == 0 else num_prompt + step - 1
        for place in range(num_prompt + step):
            is_own = place >= first
            fill = {"facecolor": OWN if is_own else READ, "hatch": "" if is_own else ".."}
            axes.add_patch(Rectangle((place, -step), 0.9, 0.8, edgecolor=EDGE, lw=0.7, **fill))
        axes.text(-0.3, 0.4 - step, "decode" if step else "prefill", ha="right", va="center")
        tokens = "1 token" if step else f"{num_prompt} tokens"
        axes.text(9.4, 0.4 - step, f"all weights are read for {tokens}", va="center")
    title = "Four steps of one request with a prompt of six tokens"
    about = "dark: position computed in this step; dotted: keys and values read from the cache"
    finish(axes, title, about, xlim=(-1.8, 15.2), ylim=(-3.2, 1.0))
    return figure


def rope() -> Figure:
    """A pair of a query and one of a key, rotated by their positions, at two places of a text."""
    figure = Figure(figsize=(7.2, 3.3), layout="constrained")
    for axes, (query_at, key_at) in zip(figure.subplots(1, 2), ((5, 2), (12, 9)), strict=True):
        axes.add_patch(Circle((0, 0), 1, fill=False, edgecolor="#bbbbbb", linestyle=":"))
        for name, position, color in (("query", query_at, "#08519c"), ("key", key_at, "#c8691c")):
            angle = math.radians(15 + 25 * position)
            x, y = math.cos(angle), math.sin(angle)
            look = {"arrowstyle": "-|>", "color": color, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
            axes.annotate("", (x, y), (0, 0), arrowprops=look)
            side = "left" if x > 0 else "right"
            axes.text(1.1 * x, 1.15 * y, f"{name} at {position}", ha=side, va="center")
        title, about = f"{query_at} and {key_at}: distance 3", "the angle between them is 75°"
        finish(axes, title, about, xlim=(-1.9, 1.9), ylim=(-1.4, 1.4), aspect="equal")
    return figure


def swiglu() -> Figure:
    """SiLU beside ReLU, and how gate and up meet."""
    figure = Figure(figsize=(9.6, 3.1), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    places = [n / 20 for n in range(-120, 81)]
    left.plot(places, [x / (1 + math.exp(-x)) for x in places], color="#08519c", lw=2, label="SiLU")
    left.plot(places, [max(0.0, x) for x in places], "--", color=EDGE, lw=1, label="ReLU")
    left.axhline(0, color="#bbbbbb", lw=0.7)
    left.legend(frameon=False)
    set_titles(left, "silu(x) = x · sigmoid(x)", "smooth, and nearly 0 for negative x")
    box(right, 0, 0, "x", width=0.9)
    box(right, 2.0, 0.8, "gate matrix", READ, 1.9)
    box(right, 2.0, -0.8, "up matrix", READ, 1.9)
    box(right, 4.7, 0.8, "SiLU", OWN, 1.2)
    box(right, 6.8, 0, "×", OWN, 0.8)
    box(right, 8.5, 0, "down matrix", READ, 1.9)
    for start, end in (
        ((0.9, 0.1), (2.0, 0.8)),
        ((0.9, -0.1), (2.0, -0.8)),
        ((3.9, 0.8), (4.7, 0.8)),
        ((5.9, 0.8), (6.8, 0.15)),
        ((3.9, -0.8), (6.8, -0.15)),
        ((7.6, 0), (8.5, 0)),
    ):
        arrow(right, start, end)
    set_titles(right, "The gate decides how much of each number of up passes", "")
    right.set(xlim=(-0.2, 10.6), ylim=(-1.4, 1.5))
    right.axis("off")
    return figure


def compiled() -> Figure:
    """A norm with the addition before it: operators one by one, and one kernel."""
    figure = Figure(figsize=(9.0, 3.3), layout="constrained")
    axes = figure.subplots()
    names = ["add", "square", "mean", "+ eps", "rsqrt", "scale", "weight"]
    for y, title in ((3.0, "eager"), (0.0, "compiled")):
        axes.text(-0.3, y, title, ha="right", va="center", fontweight="bold")
        axes.add_patch(Rectangle((0, y - 1.5), 11.6, 0.5, facecolor="#eeeeee", edgecolor=EDGE))
        axes.text(5.8, y - 1.25, "memory of the GPU", ha="center", va="center", fontsize=8.5)
    for place, name in enumerate(names):
        left = 1.7 * place
        box(axes, left, 3.0, name, OWN, 1.4)
        for side, style in ((0.4, "<|-"), (1.0, "-|>")):
            arrow(axes, (left + side, 2.6), (left + side, 2.0), style)
    box(axes, 0, 0.0, " → ".join(names), OWN, 11.6)
    arrow(axes, (1.0, -0.4), (1.0, -1.0), "<|-")
    arrow(axes, (10.6, -0.4), (10.6, -1.0))
    title = "Addition and RMSNorm, with and without torch.compile"
    about = "eager: seven kernels, and each reads and writes memory; compiled: one kernel, one trip"
    finish(axes, title, about, xlim=(-1.9, 11.8), ylim=(-1.7, 3.7))
    return figure


def finish(axes: Any, title: str, about: str, **limits: Any) -> None:
    """Titles, and no axes: nothing is counted along them."""
    set_titles(axes, title, about)
    axes.set(**limits)
    axes.axis("off")


PICTURES = {f.__name__: f for f in (prefill_decode, rope, swiglu, compiled)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PICTURES)
    parser.add_argument("-o", "--output", metavar="PATH.png", required=True)
    options = parser.parse_args()
    print("wrote", write_picture(options.output, "picture", PICTURES[options.name]))
