"""Tokens a second that the products of SmolLM2 allow on a CPU, for each number of rows.

    python -m docs.questions.m5_cpu_roofs -o docs/images/m5_cpu_roofs.png

Drawn from the record of `docs.benchmarks.cpu_products`.
"""

import argparse
import re
from pathlib import Path

from matplotlib.figure import Figure

from milestone_llm.lab.plots.picture import set_titles, write_picture

RECORD = Path("docs/measurements/cpu_products.md")
STYLES = (("0.55", ":", "v"), ("0.3", "--", "s"), ("#0072b2", "-.", "o"), ("#d55e00", "-", "D"))


def rates() -> tuple[list[int], dict[str, list[float]]]:
    """The numbers of rows, and for each kind of weights tokens a second."""
    lines = RECORD.read_text(encoding="utf-8").splitlines()
    head = next(line for line in lines if line.startswith(" ms for rows"))
    rows = [int(word) for word in re.findall(r"\d+", head)]
    found = {}
    for line in lines[lines.index(head) + 1 :]:
        match = re.match(r" (\S.*?)((?:  +[\d.]+)+)\s*$", line)
        if match:
            times = [float(word) for word in match[2].split()][: len(rows)]
            found[match[1]] = [1e3 * row / time for row, time in zip(rows, times, strict=True)]
    return rows, found


def draw() -> Figure:
    rows, found = rates()
    figure = Figure(figsize=(8.6, 4.6), layout="constrained")
    axes = figure.add_subplot()
    for (kind, values), (colour, line, marker) in zip(found.items(), STYLES, strict=True):
        axes.plot(rows, values, color=colour, linestyle=line, marker=marker, label=kind)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", type=Path, required=True, metavar="PATH.png")
    print(write_picture(parser.parse_args().o, "picture", draw))


if __name__ == "__main__":
    main()
