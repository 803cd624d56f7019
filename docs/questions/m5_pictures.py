"""Pictures of M5, one idea each: `python -m docs.questions.m5_pictures order -o PATH.png`"""

import argparse
from typing import Any
from unittest.mock import patch

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import m1_single
import m5_kernels
from docs.questions.flash_decode_by_hand import split
from docs.questions.small_pictures import EDGE, OWN, PLAIN, READ, arrow, box, finish
from m1_single import SamplingParams
from milestone_llm.lab.plots.picture import set_titles, write_picture

ROWS, CONTEXT, KV_BYTES = 64, 600, 28 * 2 * 8 * 128 * 2
"""A step of Qwen3-0.6B: 28 layers, keys and values, 8 heads of 128, 2 bytes a number."""
LOOKS = ((OWN, ""), (PLAIN, "////"), ("#e8a13a", ""))
"""Of a sequence, or of a program: told apart in grey, too."""


def bar(axes: Axes, x: float, y: float, width: float, text: str, look: tuple[str, str]) -> None:
    """A box of any width; its text stands on white if the box is hatched."""
    place = (x + 0.03, y - 0.35)
    fill, hatch = look
    axes.add_patch(
        Rectangle(place, width - 0.06, 0.7, facecolor=fill, hatch=hatch, edgecolor=EDGE, lw=0.8)
    )
    behind = {"pad": 0.8, "facecolor": PLAIN, "edgecolor": "none"} if hatch else None
    axes.text(x + width / 2, y, text, ha="center", va="center", fontsize=8.5, bbox=behind)


def split_merge() -> Figure:
    """Shares of tiles, what each program leaves, and who merges."""
    figure = Figure(figsize=(9.6, 3.9), layout="constrained")
    axes = figure.subplots()
    lens, tile, num_programs = [5, 1, 6], 1, 4
    splits = split(lens, tile, num_programs)
    starts = [sum(lens[:seq]) for seq in range(len(lens))]
    for seq, (start, count) in enumerate(zip(starts, lens, strict=True)):
        for number in range(count):
            bar(axes, start + number, 3.9, 1, str(number), LOOKS[seq])
        axes.text(start + count / 2, 4.5, f"sequence {seq}", ha="center", va="center", fontsize=9)
    share = sum(lens) / num_programs
    for program in range(num_programs):
        bar(axes, program * share, 2.8, share, f"program {program}: 3 tiles", ("#eeeeee", ""))
    parts: dict[int, list[float]] = {seq: [] for seq in range(len(lens))}
    for part in splits:
        start, width = starts[part.seq] + part.first_tile, part.end_tile - part.first_tile
        is_whole = width == lens[part.seq]
        text = "whole" if is_whole else "part, log-sum-exp"
        bar(axes, start, 1.7, width, text, LOOKS[part.seq])
        parts[part.seq].append(start + width / 2)
    for seq, middles in parts.items():
        middle = sum(middles) / len(middles)
        for each in middles:
            arrow(axes, (each, 1.3), (middle + 0.3 * (each - middle), 0.7))
        text = f"merge: output of {seq}" if len(middles) > 1 else f"output of {seq}"
        width = 3.4 if len(middles) > 1 else 1.6
        bar(axes, middle - width / 2, 0.3, width, text, LOOKS[seq])
    names = ((3.9, "KV tiles"), (2.8, "equal shares"), (1.7, "what each leaves"), (0.3, "output"))
    for y, name in names:
        axes.text(-0.3, y, name, ha="right", va="center", fontsize=9)
    title = "Flash-Decoding: twelve tiles among four programs"
    about = "a sequence that was cut is merged by the last of its programs that is done"
    finish(axes, title, about, xlim=(-2.7, 12.2), ylim=(-0.2, 4.9))
    return figure


def gather() -> Figure:
    """How attention gets at keys in blocks: M3 copies them first, M5 reads them where they are."""
    figure = Figure(figsize=(9.6, 3.5), layout="constrained")
    moved = ROWS * CONTEXT * KV_BYTES / 1e9
    for axes, milestone in zip(figure.subplots(1, 2), ("M3", "M5"), strict=True):
        table = (6, 1, 4)
        for block in range(8):
            place = table.index(block) if block in table else None
            look = ("#eeeeee", "") if place is None else LOOKS[place]
            bar(axes, block, 3, 1, "" if place is None else str(place), look)
        if milestone == "M3":
            for place, block in enumerate(table):
                arrow(axes, (block + 0.5, 2.6), (2.5 + place + 0.5, 1.95))
                bar(axes, 2.5 + place, 1.6, 1, str(place), LOOKS[place])
            arrow(axes, (4.0, 1.2), (4.0, 0.5))
            axes.text(7.2, 2.25, "read,\nwritten", fontsize=9, va="center")
            axes.text(4.3, 0.85, "read", fontsize=9, va="center")
            about = f"a copy in each layer, then attention: {3 * moved:.1f} GB in a step"
        else:
            for place, block in enumerate(table):
                arrow(axes, (block + 0.5, 2.6), (3.2 + 0.8 * place, 0.5))
            axes.text(
                6.2, 1.6, "read, tile by tile,\nthrough the block table", fontsize=9, va="center"
            )
            about = f"no copy: {moved:.1f} GB in a step"
        box(axes, 2.4, 0.1, "attention", READ, 3.2)
        finish(
            axes,
            f"{milestone}, {ROWS} rows of {CONTEXT} tokens",
            about,
            xlim=(-0.2, 9.6),
            ylim=(-0.5, 3.5),
        )
    return figure


def calls_of(package: Any) -> list[list[tuple[str, int]]]:
    """For each call of `step()` the parts that it ran, each with the number of its step."""
    engine = package.LLMEngine("tiny-llama", device="cpu", max_model_len=64)
    engine.add_request([5, 9, 33], SamplingParams(max_tokens=3, ignore_eos=True))
    calls: list[list[tuple[str, int]]] = []
    counts = {"plan": 0, "launch": 0, "settle": 0}

    def noting(name: str, owner: Any, method: str) -> Any:
        function = getattr(owner, method)

        def call(*args: Any) -> Any:
            result = function(*args)
            if name != "plan" or not result.is_empty:
                calls[-1].append((name, counts[name]))
                counts[name] += 1
            return result

        return patch.object(owner, method, call)

    core = engine.core
    with (
        noting("plan", core.scheduler, "schedule"),
        noting("launch", core, "launch"),
        noting("settle", core, "settle"),
    ):
        while engine.has_unfinished_requests():
            calls.append([])
            engine.step()
    return calls


def order() -> Figure:
    """Plan, launch and settle as the engines of M1 and M5 call them, above what a GPU does."""
    figure = Figure(figsize=(10, 4.1), layout="constrained")
    looks = {"plan": ("#bcd3e6", ""), "launch": (OWN, ""), "settle": (PLAIN, "////")}
    panels = figure.subplots(2, 1, sharex=True)
    compute = 3.0  # times a part of the host
    for axes, package in zip(panels, (m1_single, m5_kernels), strict=True):
        host, device = 0.0, 0.0
        ends: list[float] = []
        for number, call in enumerate(calls_of(package)):
            begin = host
            for name, step in call:
                if name == "settle":
                    host = max(host, ends[step])
                bar(axes, host, 1.5, 1, f"{name}\n{step}", looks[name])
                host += 1
                if name == "launch":
                    start = max(host, device)
                    device = start + compute
                    ends.append(device)
                    bar(axes, start, 0.5, compute, f"step {step}", ("#a9d8cd", ""))
            axes.plot([begin + 0.06, host - 0.06], [2.05, 2.05], color=EDGE, lw=1)
            axes.text((begin + host) / 2, 2.25, f"step() {number}", ha="center", fontsize=8)
        for y, name in ((1.5, "host"), (0.5, "GPU")):
            axes.text(-0.2, y, name, ha="right", va="center", fontsize=9)
        is_first = package is m1_single
        about = "a step is settled in the call that launched it: the GPU waits for the host"
        if not is_first:
            about = "a step is settled in the next call: the GPU has work meanwhile"
        set_titles(axes, "M1" if is_first else "M5", about, above=2)
        axes.set(xlim=(-1.2, 18.2), ylim=(-0.1, 2.7))
        axes.axis("off")
    return figure


PICTURES = {f.__name__: f for f in (split_merge, gather, order)}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", choices=PICTURES)
    parser.add_argument("-o", "--output", metavar="PATH.png", required=True)
    options = parser.parse_args()
    print("wrote", write_picture(options.output, "picture", PICTURES[options.name]))
