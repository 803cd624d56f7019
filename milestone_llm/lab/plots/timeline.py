"""Draw traces as Gantt charts next to each other: requests over steps, batch size and KV use
below."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.container import Container
from matplotlib.figure import Figure

from milestone_llm.core.errors import InputError
from milestone_llm.lab.explorer.positions import useful_share
from milestone_llm.lab.explorer.spans import arrival_order
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.text import plural

from .block_history import kv_during_steps
from .picture import set_titles, whole_numbers, write_picture
from .timeline_panels import Extents, draw_batch, draw_kv, draw_requests

_X_NAMES = {
    "step": "step",
    "positions": "positions computed",
    "time": "seconds spent in steps",
}
_ROW_NAMES = ("request", "rows in\nthe batch", "KV cache,\ntokens")


def draw_timeline(
    traces: Sequence[Sequence[StepRecord]],
    labels: Sequence[str],
    path: str | Path,
    by: str = "step",
) -> Path:
    """Draw traces next to each other and write the picture. Returns its path.

    Args:
        traces: the records of each run.
        labels: a title for each trace.
        path: file to write; ends in .png or .svg.
        by: "step" (all steps have the same width), "positions" (what they computed) or "time"
            (their duration, in seconds).

    Raises:
        InputError: the path has another ending, or `by` is "time" and a trace has no times.
    """
    extents = [step_extents(records, by) for records in traces]
    return write_picture(path, "timeline", lambda: _draw(traces, labels, extents, by))


def step_extents(records: Sequence[StepRecord], by: str) -> Extents:
    """Return where each step begins and ends on the x axis.

    By "step", step 7 is from 6.5 to 7.5; by "positions" and by "time", steps follow one another.

    Raises:
        InputError: see `draw_timeline`.
    """
    if by == "step":
        return {record.step: (record.step - 0.5, record.step + 0.5) for record in records}
    if by == "positions":
        widths = [float(sum(row.num_new_tokens for row in record.batch)) for record in records]
    else:
        widths = [(r.schedule_ms + r.execute_ms + r.update_ms) / 1000 for r in records]
        if not any(widths):
            raise InputError("the trace holds no times: draw it by step")
    ends = np.cumsum([0.0, *widths])
    return {record.step: both for record, both in zip(records, pairwise(ends), strict=True)}


def _draw(
    traces: Sequence[Sequence[StepRecord]], labels: Sequence[str], extents: list[Extents], by: str
) -> Figure:
    order = list(dict.fromkeys(name for records in traces for name in arrival_order(records)))
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
    ends = [end for steps in extents for both in steps.values() for end in both]
    grid[0, 0].set_xlim(min(ends), max(ends) + (max(ends) - min(ends)) * 0.02)
    usages = [np.array(kv_during_steps(records)) for records in traces]
    max_tokens = max(usage.sum(axis=1).max() for usage in usages)
    for column, records, steps, usage, label in zip(
        grid.T, traces, extents, usages, labels, strict=True
    ):
        requests, batch, kv = column
        draw_requests(requests, records, steps, order)
        x = [end for record in records for end in steps[record.step]]
        draw_batch(batch, records, x)
        draw_kv(kv, records, x, usage, 4 * max_tokens)
        set_titles(requests, label, _subtitle(records, label, x[-1] if by == "time" else None))
        kv.set_xlabel(_X_NAMES[by])
        for axes in column:
            axes.grid(axis="x", color="#e4e4e4", linewidth=0.6)
            axes.set_axisbelow(True)
            if x[-1] < max(ends):
                axes.axvline(x[-1], color="black", linewidth=0.8, linestyle=(0, (1, 2)))
    for axes, name in zip(grid[:, 0], _ROW_NAMES, strict=True):
        axes.set_ylabel(name)
    for axes in grid[1:, 0]:
        axes.set_ylim(bottom=0)
    if by == "step":
        grid[0, 0].xaxis.set_major_locator(whole_numbers())
    figure.align_ylabels(grid[:, 0])
    _draw_legend(figure, grid.flat, max_columns=int(width / 1.6))
    return figure


def _draw_legend(figure: Figure, panels: Iterable[Axes], max_columns: int) -> None:
    """Draw one legend entry for each thing that occurs in the panels."""
    handles: dict[str, Artist] = {}
    for axes in panels:
        entries = zip(*axes.get_legend_handles_labels(), strict=True)
        for handle, name in sorted(entries, key=lambda entry: not isinstance(entry[0], Container)):
            handles.setdefault(name, handle)  # bars of phases come before the marks on them
    num_lines = math.ceil(len(handles) / max_columns)
    columns, place = math.ceil(len(handles) / num_lines), "outside lower center"
    figure.legend(list(handles.values()), list(handles), loc=place, ncols=columns, frameon=False)


def _subtitle(records: Sequence[StepRecord], label: str, seconds: float | None) -> str:
    milestone = records[0].milestone
    text = "" if milestone in label else f"{milestone}: "
    text += plural(len(records), "step") + (f" in {seconds:,.3g} s" if seconds else "")
    return f"{text}, {useful_share(records):.0%} of the computed positions useful"
