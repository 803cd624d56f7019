"""Draw which request held each KV block, step by step, as M3's demo does.

A line is a block, and time goes to the right. A bar has the colour of its request; it fills from
pale to solid as tokens are stored. Blank is free. A block of several requests changes colour with
every step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from milestone_llm.core.errors import InputError
from milestone_llm.lab.explorer.kv_figures import kv_figures
from milestone_llm.lab.explorer.spans import arrival_order, request_marks
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.text import plural, request_color

from .block_history import BlockState, block_history
from .picture import mark_style, set_titles, whole_numbers, write_picture

_MAX_LEGEND = 12
"""Most requests in the legend; more do not fit."""


def draw_kvmap(records: Sequence[StepRecord], path: str | Path) -> Path:
    """Draw the map of a run of m2_batching or later, and write the picture. Returns its path.

    Args:
        path: file to write; ends in .png or .svg.

    Raises:
        InputError: the trace's milestone has no blocks, or the path has another ending.
    """
    if records[0].kv.unit == "token":
        raise InputError(
            f"the trace is of {records[0].milestone}, whose KV cache has no blocks: "
            "take one of m2_batching or later"
        )
    return write_picture(path, "map", lambda: _draw(records, list(block_history(records))))


def _draw(records: Sequence[StepRecord], states: Sequence[BlockState]) -> Figure:
    num_blocks, order = states[0].num_blocks, arrival_order(records)
    height = min(max(0.17 * num_blocks, 1.4), 7.0)
    figure = Figure(figsize=(9.5, height + 1.3), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel=f"KV {records[0].kv.unit}")
    axes.xaxis.set_major_locator(whole_numbers())
    axes.yaxis.set_major_locator(whole_numbers(9))
    _draw_blocks(axes, states, order)
    for kind in ("preempted", "resumed"):
        steps = [mark.step for mark in request_marks(records) if mark.kind == kind]
        if steps:  # above the map
            place: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "clip_on": False}
            axes.scatter(steps, [1.02] * len(steps), **place, **mark_style(kind, 30))
    copies = [
        (record.step, event.blocks[-1])
        for record in records
        for event in record.events
        if event.type == "copy_on_write"
    ]
    if copies:  # at the beginning of the new block
        axes.scatter(*zip(*copies, strict=True), **mark_style("copy_on_write", 30))
    set_titles(axes, records[0].milestone, _subtitle(records, states[0].block_size), above=10)
    handles: list[Artist] = [
        Patch(facecolor=request_color(index), label=name)
        for index, name in enumerate(order[:_MAX_LEGEND])
    ]
    if len(order) > _MAX_LEGEND:
        handles.append(Patch(facecolor="none", label=f"{len(order) - _MAX_LEGEND} more"))
    handles += [
        Patch(facecolor="#d8d8d8", label="reserved, empty"),
        Patch(facecolor="white", edgecolor="#c4c4c4", linewidth=0.8, label="free"),
        *axes.get_legend_handles_labels()[0],
    ]
    figure.legend(handles=handles, loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _draw_blocks(axes: Axes, states: Sequence[BlockState], order: Sequence[str]) -> None:
    """Paint every block in every step: pale, and solid from below as far as it is filled."""
    size, num_blocks, first = states[0].block_size, states[0].num_blocks, states[0].step
    levels = max(1, min(size, 16, 8000 // num_blocks))
    image = np.full((num_blocks, levels, states[-1].step - first + 1, 3), 255, dtype=np.uint8)
    colors = {n: 255 * np.array(to_rgb(request_color(i))) for i, n in enumerate(order)}
    for state in states:
        for block, holders in state.holders.items():
            color = colors[holders[state.step % len(holders)]]
            column = image[block, :, state.step - first]
            column[:] = 0.25 * color + 191
            column[levels - math.ceil(levels * state.stored[block] / size) :] = color
    sides = first - 0.5, states[-1].step + 0.5
    whole = image.reshape(num_blocks * levels, -1, 3)
    extent = (*sides, num_blocks - 0.5, -0.5)
    axes.imshow(whole, extent=extent, aspect="auto", interpolation="nearest")
    axes.hlines(
        np.arange(num_blocks) + 0.5, *sides, colors="white", linewidths=min(1.4, 60 / num_blocks)
    )


def _subtitle(records: Sequence[StepRecord], size: int) -> str:
    figures, unit = kv_figures(records), plural(records[0].kv.total, records[0].kv.unit)
    text = f"{plural(len(records), 'step')}, {unit} of {plural(size, 'token')}"
    empty = f", {figures['waste_share']:.1%} of the reserved places empty"
    return text + (empty if figures["reserved_tokens"] else "")
