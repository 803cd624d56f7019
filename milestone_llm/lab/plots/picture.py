"""What every picture of a trace needs: a file to write to, titles."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .command import check_suffix

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "trace",  # the same trace gives the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def write_picture(path: str | Path, what: str, draw: Callable[[], Figure]) -> Path:
    """Draw a figure in the common look and write it; returns the path.

    Raises:
        ValueError: the path ends in neither .png nor .svg, or `draw` raises it.
    """
    path = Path(path)
    suffix = check_suffix(path, what)
    with matplotlib.rc_context(_RC):
        figure = draw()
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150, metadata={"Date": None} if suffix == ".svg" else None)
    return path


def set_titles(axes: Axes, title: str, subtitle: str, above: int = 6) -> None:
    """A bold title and below it a line in plain type, `above` points over the panel."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=above + 14)
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(subtitle, (0, 1), xytext=(0, above), fontsize=9, **place)


def whole_numbers(count: int | Literal["auto"] = "auto") -> MaxNLocator:
    """Ticks for steps, rows and blocks."""
    return MaxNLocator(nbins=count, integer=True, steps=[1, 2, 5, 10])
