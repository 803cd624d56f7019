"""Draw traces as Gantt charts: requests over steps, batch size and KV use below.

    python -m m1_single.timeline trace.jsonl [more.jsonl ...] -o timeline.png

Several traces stand side by side on shared axes - same scale, same requests in the same lines -
so that the milestones compare at a glance.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from milestone_llm.trace.tracer import read_jsonl

from .style import PHASE_STYLE, request_color
from .timeline_panels import MAX_THICK, Extents, draw_batch, draw_kv, draw_requests, legend_handles
from .timeline_spans import Span, arrival_order, check_one_run, request_spans, useful_share

__all__ = [
    "PHASE_STYLE",
    "Span",
    "draw_timeline",
    "main",
    "request_color",
    "request_spans",
    "step_extents",
    "useful_share",
]

SUFFIXES = (".png", ".svg")
_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "hatch.linewidth": 0.7,
    "svg.hashsalt": "timeline",  # the same trace gives the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw_timeline(
    traces: list[list[dict[str, Any]]],
    labels: list[str],
    path: str | Path,
    by: str = "step",
) -> Path:
    """Draw traces side by side and write the picture.

    Args:
        traces: per trace its records, as `read_jsonl` or `StepRecord.to_dict` give them.
        labels: one title per trace.
        path: where to write; ends in .png or .svg.
        by: "step" (all steps equally wide) or "time" (as wide as they took, in seconds).

    Returns:
        The path written.

    Raises:
        ValueError: a trace is empty or holds several runs, the labels are not one per trace, or
            the path has another ending.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a timeline is written as .png or .svg")
    if len(labels) != len(traces):
        raise ValueError(f"there are {len(traces)} traces, but {len(labels)} labels")
    extents = [step_extents(records, by) for records in traces]
    order = list(dict.fromkeys(name for records in traces for name in arrival_order(records)))
    with matplotlib.rc_context(_RC):
        figure = _draw_figure(traces, labels, extents, order, by)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    return path


def step_extents(records: list[dict[str, Any]], by: str) -> Extents:
    """Where each step begins and ends on the x axis.

    By "step", step 7 reaches from 6.5 to 7.5; by "time", steps follow one another in seconds.

    Raises:
        ValueError: see `draw_timeline`.
    """
    check_one_run(records)
    if by == "step":
        return {record["step"]: (record["step"] - 0.5, record["step"] + 0.5) for record in records}
    extents, now = {}, 0.0
    for record in records:
        milliseconds = record["schedule_ms"] + record["execute_ms"] + record["update_ms"]
        extents[record["step"]] = (now, now + milliseconds / 1000)
        now += milliseconds / 1000
    if now == 0:
        raise ValueError("the trace holds no times: draw it by step")
    return extents


def _draw_figure(
    traces: list[list[dict[str, Any]]],
    labels: list[str],
    extents: list[Extents],
    order: list[str],
    by: str,
) -> Figure:
    gantt_height = min(max(0.3 * len(order), 0.8, min(0.45 * len(order), 1.35)), 7.0)
    width = {1: 9.5, 2: 13.0}.get(len(traces), 4.8 * len(traces))
    figure = Figure(figsize=(width, gantt_height + 4.1), layout="constrained")
    grid = figure.subplots(
        3,
        len(traces),
        squeeze=False,
        sharex=True,
        sharey="row",
        height_ratios=[gantt_height, 1.1, 1.3],
    )
    lowest = min(ends[0] for steps in extents for ends in steps.values())
    highest = max(ends[1] for steps in extents for ends in steps.values())
    grid[0, 0].set_xlim(lowest, highest + (highest - lowest) * 0.02)
    if by == "step":
        grid[0, 0].xaxis.set_major_locator(
            MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10])
        )
    phases: set[str] = set()
    tops: list[list[float]] = [[], []]
    for column, records in enumerate(traces):
        requests, batch, kv = grid[:, column]
        phases |= draw_requests(requests, records, extents[column], order)
        draw_batch(batch, records, extents[column])
        draw_kv(kv, records, extents[column])
        tops[0].append(batch.get_ylim()[1])
        tops[1].append(kv.get_ylim()[1])
        end = extents[column][records[-1]["step"]][1]
        seconds = f" in {end:,.3g} s" if by == "time" else ""
        _draw_title(requests, labels[column], records, seconds)
        kv.set_xlabel("step" if by == "step" else "seconds spent in steps")
        for axes in (requests, batch, kv):
            _dress(axes, end, has_rest=end < highest)
    for row, name in enumerate(("request", "rows in\nthe batch", "KV cache,\ntokens")):
        grid[row, 0].set_ylabel(name)
    grid[1, 0].set_ylim(0, max(tops[0]))
    grid[2, 0].set_ylim(0, max(tops[1]))
    figure.align_ylabels(grid[:, 0])
    every_record = [record for records in traces for record in records]
    handles = legend_handles(every_record, phases, has_glyphs=len(order) <= MAX_THICK)
    num_lines = math.ceil(len(handles) / (width / 1.6))
    num_columns = math.ceil(len(handles) / num_lines)
    figure.legend(handles=handles, loc="outside lower center", ncols=num_columns, frameon=False)
    return figure


def _draw_title(axes: Axes, label: str, records: list[dict[str, Any]], seconds: str) -> None:
    milestone = records[0]["milestone"]
    name = "" if milestone in label else f"{milestone}: "
    share = f"{useful_share(records):.0%} of the computed positions useful"
    axes.set_title(label, loc="left", fontsize=11, fontweight="bold", pad=20)
    axes.annotate(
        f"{name}{len(records):,} steps{seconds}, {share}",
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 6),
        textcoords="offset points",
        fontsize=9,
    )


def _dress(axes: Axes, end: float, has_rest: bool) -> None:
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    if has_rest:
        axes.axvline(end, color="black", linewidth=0.8, linestyle=(0, (1, 2)))


def main(arguments: list[str] | None = None) -> None:
    """Command line; bad input ends with exit code 2 and one line that says why."""
    parser = argparse.ArgumentParser(prog="python -m m1_single.timeline", description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="trace.jsonl", help="written by trace=PATH")
    parser.add_argument("-o", "--output", default="timeline.png", help=".png or .svg")
    parser.add_argument("--labels", help="titles, separated by commas (default: the milestones)")
    parser.add_argument("--by", choices=("step", "time"), default="step", help="what x counts")
    options = parser.parse_args(arguments)
    try:
        traces = [_read(path) for path in options.traces]
        labels = [trace[0]["milestone"] for trace in traces]
        if options.labels is not None:
            labels = options.labels.split(",")
        written = draw_timeline(traces, labels, options.output, by=options.by)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except KeyError as error:
        parser.error(f"a record has no field {error}")
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {written}")


def _read(path: str) -> list[dict[str, Any]]:
    records = read_jsonl(path)
    if not records:
        raise ValueError(f"{path}: the trace has no steps")
    return records


if __name__ == "__main__":
    main()
