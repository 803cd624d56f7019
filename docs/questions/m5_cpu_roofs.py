"""Tokens a second that the products of SmolLM2 allow on a CPU, for each number of rows.

    python -m docs.questions.m5_cpu_roofs -o docs/images/m5_cpu_roofs.png

The figures are those of a record of `docs.benchmarks.cpu_products`.
"""

import argparse
import re
from pathlib import Path

from matplotlib.figure import Figure

from milestone_llm.lab.plots.picture import set_titles, write_picture

RECORD = Path("docs/measurements/cpu_products.md")
STYLES = (("0.55", ":", "v"), ("0.3", "--", "s"), ("#0072b2", "-.", "o"), ("#d55e00", "-", "D"))


def draw() -> Figure:
    head, *lines = RECORD.read_text(encoding="utf-8").partition(" ms for rows:")[2].splitlines()
    rows = [int(word) for word in head.split()[:-1]]
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for line, (colour, dashes, marker) in zip(lines, STYLES, strict=False):
        kind, *times = re.split("  +", line.strip())
        rates = [1e3 * row / float(ms) for row, ms in zip(rows, times, strict=False)]
        axes.plot(rows, rates, color=colour, linestyle=dashes, marker=marker, label=kind)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(rows, [str(row) for row in rows])
    ticks = [25, 50, 100, 200, 400, 800, 1600]
    axes.set_yticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("rows in a step")
    axes.set_ylabel("tokens a second, products alone")
    axes.grid(color="0.9")
    axes.legend(frameon=False, loc="lower right")
    set_titles(
        axes,
        "Fewer bits lift the slope, not the roof",
        "Few rows wait for weights to be read, many for arithmetic",
    )
    return figure


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", type=Path, required=True, metavar="PATH.png")
print(write_picture(parser.parse_args().o, "picture", draw))
