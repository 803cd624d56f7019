"""Common parts of all pictures: path, file, titles. This module does not load matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from milestone_llm.cli import try_to_write
from milestone_llm.core.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "trace",  # the same trace gives the same file
    "text.parse_math": False,  # a request may have the name $x$
    "axes.spines.top": False,
    "axes.spines.right": False,
}

MARKS = {"preempted": "v", "resumed": "^", "copy_on_write": "D"}
"""Kind of event -> matplotlib's marker; `mark_style` returns the rest."""


def write_picture(path: str | Path, what: str, draw: Callable[[], Figure]) -> Path:
    """Draw a figure in the common style and write it. Returns its path.

    Raises:
        InputError: the path ends in neither .png nor .svg, or cannot be written.
    """
    import matplotlib
    from matplotlib.ticker import LogFormatterMathtext, NullFormatter

    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in (".png", ".svg"):
        raise InputError(f"{path}: a {what} is written as .png or .svg")
    try_to_write(path)
    with matplotlib.rc_context(_RC):
        metadata = {"Date": None} if suffix == ".svg" else None
        figure = draw()
        for axis in (axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)):
            # because math is not parsed
            if isinstance(axis.get_major_formatter(), LogFormatterMathtext):
                axis.set_major_formatter(lambda value, _: f"{value:,.10g}")
                axis.set_minor_formatter(NullFormatter())
        figure.savefig(path, dpi=150, metadata=metadata)
    return path


def set_titles(axes: Axes, title: str, subtitle: str, above: int = 6) -> None:
    """Set a bold title and a plain line below it, `above` points over the panel."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=above + 14)
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    axes.annotate(subtitle, (0, 1), xytext=(0, above), fontsize=9, **place)


def whole_numbers(count: int | Literal["auto"] = "auto") -> MaxNLocator:
    """Return a locator of whole ticks, for steps, rows and blocks."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=count, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def mark_style(kind: str, size: float) -> dict[str, Any]:
    """Return keywords for `Axes.scatter`; `size` is in square points."""
    look = {"facecolor": "white", "edgecolor": "black", "linewidth": 0.8, "zorder": 6}
    return {**look, "marker": MARKS[kind], "s": size, "label": kind.replace("_", "-")}
