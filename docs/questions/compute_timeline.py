"""CPU and GPU in three ways of running decode steps, simulated. `-o PATH.png` draws it.

The durations below are made up so that some steps fit on a page: eight kernels a step stand for
some three hundred. What is simulated is who waits for whom.
"""

import argparse
import json
from dataclasses import dataclass, field
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from milestone_llm.lab.plots.picture import set_titles, write_picture

PLAN, LAUNCH, KERNEL, SETTLE, KERNELS, STEPS = 4.0, 4.0, 1.5, 3.0, 8, 10
END = 122
"""Of what is drawn."""


@dataclass
class Machine:
    """Two clocks, and what was done when: (who, what, step, start, end)."""

    cpu: float = 0.0
    gpu: float = 0.0
    done: list[tuple[str, str, int, float, float]] = field(default_factory=list)

    def host(self, what: str, step: int, duration: float) -> None:
        """The CPU works."""
        self.done.append(("CPU", what, step, self.cpu, self.cpu + duration))
        self.cpu += duration

    def kernels(self, step: int, count: int) -> None:
        """The GPU gets work: it begins when it is told and has done what it had before."""
        for _ in range(count):
            start = max(self.cpu, self.gpu)
            self.gpu = start + KERNEL
            self.done.append(("GPU", "kernel", step, start, self.gpu))

    def end_of(self, step: int) -> float:
        """When the last kernel of a step ends."""
        return max(end for who, _, of, _, end in self.done if who == "GPU" and of == step)

    def settle(self, step: int) -> None:
        """The CPU waits for a step's tokens and takes them in."""
        self.cpu = max(self.cpu, self.end_of(step))
        self.host("settle", step, SETTLE)


def run(way: str) -> Machine:
    """Some steps: plan, launch, settle."""
    machine = Machine()
    for step in range(STEPS):
        machine.host("plan", step, PLAN)
        if way == "eager":
            for _ in range(KERNELS):
                machine.host("launch", step, LAUNCH)
                machine.kernels(step, 1)
        else:
            machine.host("launch", step, LAUNCH)
            machine.kernels(step, KERNELS)
        if way == "pipelined":  # settle one step later
            if step:
                machine.settle(step - 1)
        else:
            machine.settle(step)
    return machine


WAYS = {
    "eager": "a launch a kernel: the GPU waits for launches",
    "graph": "one launch a step: the GPU waits for Python between steps",
    "pipelined": "step n is settled while step n+1 runs: the GPU does not wait",
}
LOOKS = {
    "plan": ("#08519c", ""),
    "launch": ("#74b3e0", ""),
    "settle": ("#ffffff", "////"),
    "kernel": ("#3f9c8b", ""),
}


def draw() -> Figure:
    """A panel for each way: what the CPU does above, what the GPU does below."""
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    panels = figure.subplots(3, 1, sharex=True)
    for axes, (way, subtitle) in zip(panels, WAYS.items(), strict=True):
        machine = run(way)
        for who, what, step, start, end in machine.done:
            fill, hatch = LOOKS[what]
            if what == "kernel" and step % 2:
                fill = "#a9d8cd"
            look = {"facecolor": fill, "hatch": hatch, "edgecolor": "#222222", "linewidth": 0.6}
            place = (start, 0.0 if who == "GPU" else 1.0)
            axes.add_patch(Rectangle(place, end - start, 0.75, **look))
            if what in ("plan", "settle"):
                ink, fill = ("white", "none") if what == "plan" else ("black", "white")
                behind = {"pad": 1, "facecolor": fill, "edgecolor": "none"}
                middle = ((start + end) / 2, 1.37)
                axes.text(
                    *middle, str(step), color=ink, clip_on=True,
                    ha="center", va="center", fontsize=8, bbox=behind,
                )  # fmt: skip
        for step in range(STEPS):
            times = [
                (start, end)
                for who, _, of, start, end in machine.done
                if (who, of) == ("GPU", step)
            ]
            middle = (times[0][0] + times[-1][1]) / 2
            if middle < END:
                axes.text(middle, -0.12, f"step {step}", ha="center", va="top", fontsize=8)
        set_titles(axes, way, subtitle, above=2)
        axes.set(xlim=(0, END), ylim=(-0.55, 1.8), yticks=(0.37, 1.37), yticklabels=("GPU", "CPU"))
        axes.tick_params(bottom=False, left=False)
        axes.spines[["left", "bottom"]].set_visible(False)
    panels[-1].set_xlabel("time, in units of the simulation")
    marks = [
        Patch(facecolor=fill, hatch=hatch, edgecolor="#222222", label=what)
        for what, (fill, hatch) in LOOKS.items()
    ]
    figure.legend(handles=marks, loc="outside upper right", ncols=4, frameon=False)
    return figure


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("-o", "--output", metavar="PATH.png")
options = parser.parse_args()
if options.output:
    print("wrote", write_picture(options.output, "timeline", draw))
else:
    print("way         time from step to step   GPU busy")
    for way in WAYS:
        machine = run(way)
        period = machine.end_of(STEPS - 1) - machine.end_of(STEPS - 2)
        print(f"{way:12}{period:22.1f}{KERNELS * KERNEL / period:11.0%}")
    record = json.loads(Path("docs/measurements/m5_single.json").read_text(encoding="utf-8"))
    print(f"\nrecorded: {record['environment']['device']}, {record['model']}, one request")
    for way, name in zip(WAYS, ("- graphs", "- pipelining", "m5_kernels"), strict=True):
        print(f"{way:12}{record['contestants'][name]['median']['tpot_p50']:19.2f} ms")
