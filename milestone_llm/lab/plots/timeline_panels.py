"""The three panels of a timeline, each drawn on a matplotlib `Axes`: requests, batch, KV.

Steps have a left and a right end on the x axis (`Extents`), so that the same code draws steps and
seconds. Everything drawn has its label for the common legend.

Work is grey, prefill darker than decode. Waste (padded rows, reserved but empty KV) is hatched
orange. Nothing else has a hue: on the page that replays a run, and in maps of KV memory, a hue
means a request. A picture can be read in grey and with any colour vision.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from milestone_llm.lab.explorer.spans import Mark, request_marks, request_spans
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.text import fit, plural

from .block_history import tokens_per_unit
from .picture import MARKS, mark_style, whole_numbers


def _area(label: str, fill: str, hatch: str, ink: str) -> dict[str, Any]:
    """Return keywords for matplotlib's filled shapes; `ink` is the colour of hatch and edge."""
    return {"label": label, "facecolor": fill, "hatch": hatch, "edgecolor": ink, "linewidth": 0.0}


def _waste(label: str) -> dict[str, Any]:
    return _area(f"{label} (waste)", "#fbd5ae", "/////", "#d55e00")


_PHASES = {  # in the order of the legend
    "waiting": _area("waiting", "#efefef", "", "#c4c4c4"),
    "prefill": _area("prefill", "#3f454b", "", "#3f454b"),
    "decode": _area("decode", "#a3a9af", "", "#a3a9af"),
    "padding": _waste("padding"),
    "preempted": _area("preempted", "#ffffff", "xxxxx", "#5b5f63"),
    "swapped": _area("swapped out", "#d3d6d9", ".....", "#1d1f21"),
}
_GUESSES = _waste("wrong guesses"), _area("right guesses", "#747b82", "", "#747b82")
_KV = [
    _area("KV stored", "#747b82", "", "#747b82"),
    _waste("KV reserved, empty"),
    _area("KV free, but cached", "#ffffff", "\\\\\\\\", "#5b5f63"),
]

Extents = dict[int, tuple[float, float]]

_MAX_LABELS = 40
_MAX_LABEL_LENGTH = 14
_MAX_THICK = 64
"""Plots of more requests have no labels and signs: the bars are too thin."""


def draw_requests(
    axes: Axes, records: Sequence[StepRecord], extents: Extents, order: Sequence[str]
) -> None:
    """Draw a Gantt chart: one line for each request, the first of `order` on top."""
    line_of = {request_id: line for line, request_id in enumerate(order)}
    spans, marks = request_spans(records), request_marks(records)
    for phase, look in _PHASES.items():
        own = [span for span in spans if span.phase == phase]
        if not own:
            continue
        left = np.array([extents[span.first_step][0] for span in own])
        right = np.array([extents[span.last_step][1] for span in own])
        height = 0.28 if phase == "waiting" else 0.8  # a thin track
        ink = {**look, "linewidth": 0.5}
        if phase == "prefill":
            ink |= {"linewidth": 0.8, "zorder": 3}  # one step of thousands must be visible
        axes.barh([line_of[span.request_id] for span in own], right - left, height, left, **ink)
    if len(order) <= _MAX_THICK:
        _draw_chunks(axes, records, line_of, extents)
        _draw_guesses(axes, records, line_of, extents)
        _draw_signs(axes, marks, line_of, extents)
    _draw_ends(axes, marks, line_of, extents)
    axes.set_ylim(len(order) - 0.4, -0.6)
    every = 1 << ((len(order) - 1) // _MAX_LABELS).bit_length()
    names = [fit(name, _MAX_LABEL_LENGTH) for name in order[::every]]
    axes.set_yticks(range(0, len(order), every), names)
    axes.tick_params(axis="y", length=0, labelsize=9 if len(order) <= 24 else 7)


def _draw_chunks(
    axes: Axes, records: Sequence[StepRecord], line_of: dict[str, int], extents: Extents
) -> None:
    """Mark the chunks of a prompt computed in several steps: gaps between them, and tokens of
    each."""
    own = {(row.request_id, one.step): row.num_new_tokens for one in records for row in one.batch}
    begin, end = axes.get_xlim()
    points_per_unit = 72 * axes.bbox.width / axes.figure.dpi / (end - begin)
    for span in request_spans(records):
        if span.phase != "prefill" or span.first_step == span.last_step:
            continue
        line = line_of[span.request_id]
        for step in range(span.first_step, span.last_step + 1):
            left, right = extents[step]
            axes.vlines(right, line - 0.4, line + 0.4, "white", linewidths=1, zorder=3.5)
            text = f"{own[span.request_id, step]}"
            size = (
                points_per_unit * (right - left) / (0.64 * len(text))
            )  # of a digit in DejaVu Sans
            if size >= 5:
                look: dict[str, Any] = {"fontsize": min(8.0, size), "color": "white", "zorder": 4}
                axes.text((left + right) / 2, line, text, ha="center", va="center", **look)


def _draw_guesses(
    axes: Axes, records: Sequence[StepRecord], line_of: dict[str, int], extents: Extents
) -> None:
    """Draw the draft tokens of a row: each of its 1 + k tokens has a share of the height, and
    rejected ones are above accepted ones."""
    rows = [(one.step, row) for one in records for row in one.batch if row.phase == "decode"]
    for step, row in rows:
        (left, right), top = extents[step], line_of[row.request_id] - 0.4
        num_wrong = row.num_draft_tokens - row.num_accepted_tokens
        for look, number in zip(_GUESSES, (num_wrong, row.num_accepted_tokens), strict=True):
            height = 0.8 * number / (1 + row.num_draft_tokens)
            if number:
                axes.barh(top, right - left, height, left, align="edge", **look, zorder=2.5)
            top += height


def _draw_ends(
    axes: Axes, marks: Sequence[Mark], line_of: dict[str, int], extents: Extents
) -> None:
    """Draw a tick across the bar where a request finishes, and the reason if it is unusual."""
    ended = [mark for mark in marks if mark.kind == "finished"]
    if not ended:
        return
    x_values = [extents[mark.step][mark.has_row] for mark in ended]
    lines = np.array([line_of[mark.request_id] for mark in ended])
    axes.vlines(x_values, lines - 0.4, lines + 0.4, colors="black", linewidths=1.5, zorder=4)
    axes.plot([], [], "|", color="black", markersize=10, markeredgewidth=2, label="finished")
    for mark, x, line in zip(ended, x_values, lines, strict=True):
        if mark.reason not in ("stop", "length"):
            place: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points"}
            axes.annotate(mark.reason, (x, line), fontsize=8, va="center", **place)


def _draw_signs(
    axes: Axes, marks: Sequence[Mark], line_of: dict[str, int], extents: Extents
) -> None:
    """Draw a sign in the middle of the step for each mark."""
    for kind in MARKS:
        own = [mark for mark in marks if mark.kind == kind]
        if own:
            middles = [sum(extents[mark.step]) / 2 for mark in own]
            own_lines = [line_of[mark.request_id] for mark in own]
            axes.scatter(middles, own_lines, **mark_style(kind, 36 if len(line_of) <= 24 else 12))


def draw_batch(axes: Axes, records: Sequence[StepRecord], x: Sequence[float]) -> None:
    """Draw the rows of the batch in each step, stacked: decode, prefill, padding."""
    phases = ("decode", "prefill", "padding")
    rows = [[sum(row.phase == p for row in one.batch) for p in phases] for one in records]
    _stack(axes, x, np.array(rows), [_PHASES[phase] for phase in phases])
    axes.yaxis.set_major_locator(whole_numbers(5))


def draw_kv(
    axes: Axes, records: Sequence[StepRecord], x: Sequence[float], usage: np.ndarray, limit: float
) -> None:
    """Draw tokens stored in the KV cache, above them those reserved and cached, and the capacity.

    Args:
        usage: returned by `kv_during_steps`.
        limit: a capacity above it is not drawn, because it would flatten the rest.
    """
    _stack(axes, x, usage, _KV)
    kv = records[-1].kv
    used = plural(kv.watermark, kv.unit)
    if kv.unit != "token":  # m1_single has no pool
        used = f"{kv.watermark:,} of {plural(kv.total, kv.unit)}"
        capacity = kv.total * tokens_per_unit(records)
        if 0 < capacity <= limit:
            axes.axhline(capacity, color="black", linestyle=(0, (4, 2)), lw=1, label="KV capacity")
    axes.set_title(f"most ever used: {used}", loc="right", fontsize=8)
    axes.yaxis.set_major_locator(whole_numbers(5))
    axes.yaxis.set_major_formatter("{x:,.0f}")


def _stack(axes: Axes, x: Sequence[float], values: np.ndarray, looks: list[dict[str, Any]]) -> None:
    """Draw areas on top of one another. `values`: [num_steps, num_looks]; `x`: both ends of each
    step."""
    low = np.zeros(len(x))
    for column, look in zip(values.T, looks, strict=True):
        high = low + np.repeat(column, 2)
        if column.any():
            axes.fill_between(x, low, high, **look)
        low = high
