"""Draw which KV block belonged to whom, step by step, as M3's demo does.

A line is a block, time goes to the right. A bar has the colour of its holder and fills from pale to
solid as tokens come in; blank is free. A block of several requests is striped in their colours and
has a black frame.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke

from milestone_llm.core.errors import InputError
from milestone_llm.lab.trace.spans import arrival_order, request_marks
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.text import plural, request_color

from .block_history import BlockRun, BlockState, block_history, block_runs
from .picture import MARKS, mark_style, set_titles, whole_numbers, write_picture

_WIDTH, _MAX_HEIGHT, _LEGEND_WIDTH = 9.5, 7.0, 1.8
"""Inches."""
_LEGEND_LINE = 0.18
_MAX_LEGEND = 24
"""Request colours repeat after this many."""
_MAX_MARKS = 60
_NAME_LINES = 2
"""Above the map, for names of requests."""
_MIN_FONT_SIZE = 5.5


class Room(NamedTuple):
    """Inches of a step and of a block, for what must be large enough to read."""

    step: float
    block: float


def draw_kvmap(records: Sequence[StepRecord], path: str | Path, title: str = "") -> Path:
    """Draw the map of a trace and write the picture; returns the path.

    Args:
        records: of one run of m2_batching or later.
        path: where to write; ends in .png or .svg.
        title: instead of the milestone's name.

    Raises:
        InputError: the trace is of a milestone without blocks, or the path has another ending.
    """
    if records[0].kv.unit == "token":
        raise InputError(
            f"the trace is of {records[0].milestone}, whose KV cache has no blocks: "
            "take one of m2_batching or later"
        )
    states = list(block_history(records))
    title = title or records[0].milestone
    return write_picture(path, "map", lambda: _draw(records, states, title))


def _draw(records: Sequence[StepRecord], states: Sequence[BlockState], title: str) -> Figure:
    num_blocks, first, last = states[0].num_blocks, states[0].step, states[-1].step
    height = min(max(0.17 * num_blocks, 1.4), _MAX_HEIGHT)
    room = Room((_WIDTH - _LEGEND_WIDTH) / (last - first + 1), height / num_blocks)
    figure = Figure(figsize=(_WIDTH, height + 1.3), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("step")
    axes.set_ylabel(f"KV {records[0].kv.unit}")
    axes.xaxis.set_major_locator(whole_numbers())
    axes.yaxis.set_major_locator(whole_numbers(9))
    order = arrival_order(records)
    colors = {name: request_color(index) for index, name in enumerate(order)}
    runs = block_runs(states)
    _draw_pool(axes, states, runs, colors, room)
    _draw_names(axes, states, runs, room)
    _draw_marks(axes, records, room)
    axes.set_ylim(num_blocks - 0.4, -0.6)
    set_titles(axes, title, _subtitle(records, states), above=20 + 11 * (_NAME_LINES - 1))
    has_room = min(_MAX_LEGEND, int((height + 1.3) / _LEGEND_LINE) - 7)  # for what else there is
    shown = order if len(order) <= has_room else order[: has_room - 1]
    handles: list[Artist] = [Patch(facecolor=colors[name], label=name) for name in shown]
    if len(order) > len(shown):
        handles.append(Patch(facecolor="none", label=f"{len(order) - len(shown)} more"))
    handles.append(Patch(facecolor="#d8d8d8", label="reserved, empty"))
    handles.append(Patch(facecolor="white", edgecolor="#c4c4c4", linewidth=0.8, label="free"))
    if any(state.shared for state in states):
        handles.append(Patch(facecolor="none", edgecolor="black", label="shared (striped)"))
    handles += axes.get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _subtitle(records: Sequence[StepRecord], states: Sequence[BlockState]) -> str:
    reserved = sum(state.num_reserved_tokens for state in states)
    stored = sum(state.num_stored_tokens for state in states)
    unit = plural(states[0].num_blocks, records[0].kv.unit)
    text = f"{plural(len(states), 'step')}, {unit} of {plural(states[0].block_size, 'token')}"
    text += f", at most {max(len(state.holders) for state in states):,} in use"
    text += f", {1 - stored / reserved:.1%} of the reserved places empty" if reserved else ""
    num_preemptions = sum(len(record.preempted) for record in records)
    return text + (f", {plural(num_preemptions, 'preemption')}" if num_preemptions else "")


def _draw_pool(
    axes: Axes,
    states: Sequence[BlockState],
    runs: Sequence[BlockRun],
    colors: Mapping[str, str],
    room: Room,
) -> None:
    """Paint every block in every step, pale, and solid from below as far as it is filled."""
    first, num_steps = states[0].step, states[-1].step - states[0].step + 1
    levels = max(1, min(states[0].block_size, 16, 8000 // states[0].num_blocks))
    image = np.full((states[0].num_blocks, levels, num_steps, 3), 255, dtype=np.uint8)
    solid = {name: np.array(to_rgb(color)) * 255 for name, color in colors.items()}
    stripe = max(1, round(0.09 / room.step))  # steps for which a shared block shows one colour
    for index, state in enumerate(states):
        for block, holders in state.holders.items():
            color = solid[holders[index // stripe % len(holders)]]
            cell = image[block, :, state.step - first]
            cell[:] = 0.25 * color + 191
            cell[levels - math.ceil(levels * state.stored[block] / state.block_size) :] = color
    left, right = first - 0.5, states[-1].step + 0.5
    axes.imshow(
        image.reshape(-1, num_steps, 3),
        extent=(left, right, len(image) - 0.5, -0.5),
        aspect="auto",
        interpolation="nearest",
    )
    gap = min(1.4, 20 * room.block)
    if room.block > 0.05:  # thin bars can spare none
        axes.hlines(np.arange(len(image)) + 0.5, left, right, colors="white", linewidths=gap)
    # Where one holder follows another, a gap: in grey the two might look alike.
    starts = np.array([(states[run.first].step, run.block) for run in runs]).reshape(-1, 2).T
    axes.vlines(starts[0] - 0.5, starts[1] - 0.5, starts[1] + 0.5, colors="white", linewidths=gap)
    for run in runs:
        if len(run.holders) > 1:
            corner = (states[run.first].step - 0.5, run.block - 0.43)
            axes.add_patch(Rectangle(corner, run.last - run.first + 1, 0.86, fill=False, zorder=3))


def _draw_names(
    axes: Axes, states: Sequence[BlockState], runs: Sequence[BlockRun], room: Room
) -> None:
    """The holder's id in every bar that has room for it."""
    size = min(10.0, room.block * 72 * 0.62)
    look: dict[str, Any] = {"ha": "center", "va": "center_baseline", "fontweight": "bold"}
    look |= {"color": "white", "zorder": 5, "fontsize": size}
    look["path_effects"] = [withStroke(linewidth=1.5, foreground="#222222")]
    for run in runs if size >= _MIN_FONT_SIZE else ():
        name = " ".join(run.holders)
        if run.last - run.first + 1 >= (0.7 * len(name) + 0.6) * size / 72 / room.step:
            middle = (states[run.first].step + states[run.last].step) / 2
            axes.text(middle, run.block, name, **look)


def _draw_marks(axes: Axes, records: Sequence[StepRecord], room: Room) -> None:
    """Who was preempted or resumed, above the map; copies where the new block begins."""
    marks = [mark for mark in request_marks(records) if mark.kind in ("preempted", "resumed")]
    points = {kind: [(mark.step, 1) for mark in marks if mark.kind == kind] for kind in MARKS}
    points["copy_on_write"] = [
        (record.step, event.blocks[-1])
        for record in records
        for event in record.events
        if event.type == "copy_on_write"
    ]
    top = axes.get_xaxis_transform()
    for kind, own in points.items():
        if own:
            look = mark_style(kind, 30 if len(marks) <= _MAX_MARKS else 8)
            where = axes.transData if kind == "copy_on_write" else top
            axes.scatter(*zip(*own, strict=True), transform=where, clip_on=False, **look)
    names: dict[int, list[str]] = {}  # of one step, beside one another
    for mark in marks:
        names.setdefault(mark.step, []).append(mark.request_id)
    free_from = [float("-inf")] * _NAME_LINES
    place: dict[str, Any] = {"xycoords": top, "textcoords": "offset points"}
    for step, who in names.items():
        text = ", ".join(who)
        half = (0.085 * len(text) + 0.03) / room.step / 2  # in steps
        line = next((i for i, start in enumerate(free_from) if step - half >= start), None)
        if line is not None:  # what would cover its neighbours in every line is left out
            look = {"xytext": (0, 5 + 11 * line), "annotation_clip": False, **place}
            axes.annotate(text, (step, 1.0), ha="center", fontsize=8, **look)
            free_from[line] = step + half
