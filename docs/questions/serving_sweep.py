"""Draw what clients got at each rate, all servers on shared axes.

    python -m docs.questions.serving_sweep record.json -o sweep.png

The record is what `python -m milestone_llm.serving.bench --json` writes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from milestone_llm.command.cli import ended_in_one_line
from milestone_llm.core.errors import InputError
from milestone_llm.lab.plots.picture import set_titles, write_picture

_LINES: tuple[dict[str, Any], ...] = (
    {"color": "#d55e00", "marker": "s", "linestyle": (0, (1, 1.2))},
    {"color": "#74b3e0", "marker": "o", "linestyle": (0, (5, 2))},
    {"color": "#08519c", "marker": "^", "linestyle": "-"},
    {"color": "#000000", "marker": "D", "linestyle": (0, (5, 1, 1, 1))},
    {"color": "#8b3a7c", "marker": "v", "linestyle": (0, (3, 3))},
)
"""Told apart by marker and dashes as well as by colour; go round where there are more servers."""


def draw_sweep(data: Mapping[str, Any], path: str | Path) -> Path:
    """Draw a record of the serving bench; returns the path.

    Args:
        path: where to write; ends in .png or .svg.

    Raises:
        InputError: the path has another ending, or there is nothing to draw.
    """
    if not data["points"]:
        raise InputError("the record has no points")
    return write_picture(path, "sweep", lambda: _draw(data))


def _draw(data: Mapping[str, Any]) -> Figure:
    figure = Figure(figsize=(8.0, 8.6), layout="constrained")
    ttft, inside, goodput = figure.subplots(3, 1, sharex=True)
    servers = groupby(data["points"], key=lambda point: point["server"])
    for place, (name, group) in enumerate(servers):
        points = sorted(group, key=lambda point: point["rate"])
        look = {**_LINES[place % len(_LINES)], "linewidth": 1.6, "markersize": 5}
        answered = [point for point in points if point["ttft_p50"] is not None]
        rates, p50, p95 = ([p[key] for p in answered] for key in ("rate", "ttft_p50", "ttft_p95"))
        ttft.plot(rates, p50, label=name, **look)
        beside = [rate * (1 + 0.015 * place) for rate in rates]  # or they would hide each other
        ttft.vlines(beside, p50, p95, color=look["color"], linewidth=1.0)
        ttft.scatter(beside, p95, marker="_", color=look["color"], s=40)
        for axes, key in ((inside, "most_inside"), (goodput, "goodput")):
            axes.plot([p["rate"] for p in points], [p[key] for p in points], label=name, **look)
    ttft.axhline(data["ttft_limit"], color="black", linewidth=0.8, linestyle=(0, (1, 2)))
    _finish(ttft, "time to first token, ms", "p50, and p95 above it; dotted: the limit")
    ttft.set_yscale("log")
    _finish(
        inside, "requests inside", "most at one time, running or waiting: where the queue grows"
    )
    _finish(goodput, "good requests a second", "grey: all that were offered")
    rates = sorted({point["rate"] for point in data["points"]})
    top = goodput.get_ylim()[1]
    goodput.plot(rates, rates, color="#b5b5b5", linewidth=1.0, zorder=1)
    goodput.set_ylim(0, top * 1.1)
    inside.set_ylim(bottom=0)
    goodput.set_xscale("log")
    goodput.set_xticks(rates)  # one for each rate that was measured
    goodput.xaxis.set_minor_locator(NullLocator())
    goodput.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
    goodput.set_xlabel("requests offered a second")
    handles, labels = ttft.get_legend_handles_labels()
    where = "outside lower center"
    figure.legend(handles, labels, loc=where, ncols=len(labels), frameon=False, handlelength=4)
    return figure


def _finish(axes: Axes, title: str, subtitle: str) -> None:
    set_titles(axes, title, subtitle)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.questions.serving_sweep", description=__doc__
    )
    parser.add_argument("record", type=Path, metavar="record.json")
    parser.add_argument("-o", "--output", default="sweep.png", help=".png or .svg")
    options = parser.parse_args(arguments)

    def draw() -> None:
        try:
            data = json.loads(options.record.read_text(encoding="utf-8"))
            data["points"], data["ttft_limit"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(f"{options.record}: no record of the bench ({error!r})") from None
        print(f"wrote {draw_sweep(data, options.output)}")

    return ended_in_one_line(draw)


if __name__ == "__main__":
    sys.exit(main())
