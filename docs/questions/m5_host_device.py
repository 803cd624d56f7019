"""Nine milliseconds of an H200, launched kernel by kernel and with graphs and pipelined steps.

    python -m docs.questions.m5_host_device -o docs/images/m5_host_device.png

The times are those of the two recorded traces that pages/m5.html replays.
"""

import argparse
import gzip
import json
from pathlib import Path

from matplotlib.figure import Figure

from milestone_llm.lab.plots.picture import set_titles, write_picture

TRACES = Path("docs/traces")
RUNS = (  # trace, first step, title, what is below it
    ("m5_h200_launched", 1, "Kernel by kernel: one step", "The GPU works for 1.3 ms of 8.8"),
    ("m5_h200_graphs", 2, "Graphs and pipeline: six steps", "The GPU works nearly all the time"),
)
WINDOW_MS = 8.9
COLOURS = {"plan": "#009e73", "launch": "#0072b2", "wait": "0.85", "settle": "#cc79a7"}
DEVICE = "#d55e00"


def draw() -> Figure:
    figure = Figure(figsize=(8.6, 3.9), layout="constrained")
    for place, (name, first, title, below) in enumerate(RUNS):
        axes = figure.add_subplot(2, 1, place + 1)
        with gzip.open(TRACES / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            steps = [json.loads(line) for line in lines][first:]
        for step in steps:
            at, times = (step["start_s"] - steps[0]["start_s"]) * 1e3, step["device"]
            for span in times["host"]:
                axes.broken_barh([_bar(at, span)], (1, 0.7), color=COLOURS[span["name"]], lw=0)
            # The kernels of a graph follow each other without a gap that could be seen here.
            kernels = [times] if times["is_graph"] else times["kernels"]
            axes.broken_barh([_bar(at, each) for each in kernels], (0, 0.7), color=DEVICE, lw=0)
        axes.set_xlim(0, WINDOW_MS)
        axes.set_yticks([0.35, 1.35], ["GPU", "Python"])
        set_titles(axes, title, below)
    axes.set_xlabel("ms")
    bars = [axes.broken_barh([(-1, 0)], (0, 1), color=colour) for colour in COLOURS.values()]
    bars.append(axes.broken_barh([(-1, 0)], (0, 1), color=DEVICE))
    names = [*COLOURS, "kernels"]
    figure.legend(bars, names, frameon=False, loc="outside lower right", ncols=len(names))
    return figure


def _bar(at: float, span: dict[str, float]) -> tuple[float, float]:
    """Return where a bar begins and how long it is, in ms."""
    return at + span["start_us"] / 1e3, span["us"] / 1e3


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", type=Path, required=True, metavar="PATH.png")
print(write_picture(parser.parse_args().o, "picture", draw))
