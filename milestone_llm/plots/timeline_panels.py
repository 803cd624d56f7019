"""The three panels of a timeline, each drawn on a matplotlib `Axes`: requests, batch, KV.

All take `extents`, which gives every step its left and right end on the x axis, so that the
same drawing serves steps and seconds.
"""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from .style import CACHED_STYLE, PHASE_STYLE, STORED_STYLE, WASTE_STYLE, PhaseStyle
from .timeline_spans import Mark, request_marks, request_spans

Extents = dict[int, tuple[float, float]]

MARKS = {
    "finished": ("|", "black"),
    "preempted": ("v", "white"),
    "resumed": ("^", "white"),
    "copy_on_write": ("D", "white"),
}
"""Kind of mark -> matplotlib marker and its face."""

_MAX_LABELS = 40
_MAX_LABEL_LENGTH = 14
MAX_THICK = 64
"""With more requests than this, bars are too thin for hatches and words."""


def draw_requests(
    axes: Axes, records: list[dict[str, Any]], extents: Extents, order: list[str]
) -> set[str]:
    """Gantt chart: one line a request, the first of `order` on top. Returns the phases met."""
    line_of = {request_id: line for line, request_id in enumerate(order)}
    spans = request_spans(records)
    is_thin = len(order) > MAX_THICK
    for phase, style in PHASE_STYLE.items():
        boxes = []
        half = 0.4 if phase != "waiting" else 0.28 if is_thin else 0.14  # to wait is a thin track
        for span in spans:
            if span.phase == phase:
                left, right = extents[span.first_step][0], extents[span.last_step][1]
                boxes.append(_box(left, right, line_of[span.request_id], half))
        axes.add_collection(PolyCollection(boxes, **_bar_ink(style, phase, is_thin)))
    _draw_marks(axes, request_marks(records), line_of, extents, is_thin)
    axes.set_ylim(len(order) - 0.4, -0.6)
    every = -(-len(order) // _MAX_LABELS)
    every = next(nice for nice in (1, 2, 4, 8, 16, 32, 64, every) if nice >= every)
    axes.set_yticks(range(0, len(order), every), [_short(name) for name in order[::every]])
    axes.tick_params(axis="y", length=0, labelsize=9 if len(order) <= 24 else 7)
    return {span.phase for span in spans}


def _box(left: float, right: float, line: int, half: float) -> list[tuple[float, float]]:
    top, bottom = line - half, line + half
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _bar_ink(style: PhaseStyle, phase: str, is_thin: bool) -> dict[str, Any]:
    ink: dict[str, Any] = {"facecolor": style.fill, "edgecolor": style.ink, "linewidth": 0.0}
    if is_thin:
        ink["facecolor"] = style.thin_fill or style.fill
    if phase == "prefill":
        ink |= {"linewidth": 0.8, "zorder": 3}  # one step of thousands must still be seen
    elif not is_thin:
        ink |= {"hatch": style.hatch, "linewidth": 0.5}
    return ink


def _draw_marks(
    axes: Axes, marks: list[Mark], line_of: dict[str, int], extents: Extents, is_thin: bool
) -> None:
    """A tick across the bar where a request finishes; a glyph in the middle of the step for others.

    Bars too thin for glyphs get only the ticks: their colour tells of preemptions.
    """
    finished = [mark for mark in marks if mark.kind == "finished"]
    ends = [(extents[mark.step][mark.has_row], line_of[mark.request_id]) for mark in finished]
    ticks = [[(x, line - 0.4), (x, line + 0.4)] for x, line in ends]
    axes.add_collection(
        LineCollection(ticks, colors="black", linewidths=0.8 if is_thin else 2, zorder=4)
    )
    if is_thin:
        return
    for mark, (x, line) in zip(finished, ends, strict=True):
        if mark.reason not in ("stop", "length"):
            axes.annotate(
                mark.reason,
                (x, line),
                xytext=(5, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                zorder=6,
            )
    for kind in ("preempted", "resumed", "copy_on_write"):
        glyph, face = MARKS[kind]
        of_kind = [mark for mark in marks if mark.kind == kind]
        axes.scatter(
            [sum(extents[mark.step]) / 2 for mark in of_kind],
            [line_of[mark.request_id] for mark in of_kind],
            s=36 if len(line_of) <= 24 else 12,
            marker=glyph,
            facecolor=face,
            edgecolor="black",
            linewidth=0.8,
            zorder=5,
        )


def draw_batch(axes: Axes, records: list[dict[str, Any]], extents: Extents) -> None:
    """Rows of the batch per step, stacked: prefill, decode, padding."""
    x = _stairs_x(records, extents)
    bottom = [0.0] * len(x)
    for phase in ("decode", "prefill", "padding"):
        style = PHASE_STYLE[phase]
        rows = [sum(row["phase"] == phase for row in record["batch"]) for record in records]
        top = [low + high for low, high in zip(bottom, _twice(rows), strict=True)]
        if any(rows):
            _fill(axes, x, bottom, top, style)
        bottom = top
    axes.set_ylim(0, max(bottom, default=1) * 1.15 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 2.5, 5, 10]))


def draw_kv(axes: Axes, records: list[dict[str, Any]], extents: Extents) -> None:
    """Tokens stored in the KV cache, the tokens reserved above them, and the capacity."""
    x = _stairs_x(records, extents)
    usage = [record["kv"] for record in records]
    stored = _twice([kv["stored_tokens"] for kv in usage])
    reserved = _twice([max(kv["reserved_tokens"], kv["stored_tokens"]) for kv in usage])
    _fill(axes, x, [0.0] * len(x), stored, STORED_STYLE)
    _fill(axes, x, stored, reserved, WASTE_STYLE)
    tokens_per_unit = max(
        (kv["reserved_tokens"] / kv["used"] for kv in usage if kv["used"]), default=1.0
    )
    highest = max(reserved, default=0.0)
    cached = _twice([kv["cached"] * tokens_per_unit for kv in usage])
    if any(cached):
        with_cached = [low + high for low, high in zip(reserved, cached, strict=True)]
        _fill(axes, x, reserved, with_cached, CACHED_STYLE)
        highest = max(with_cached)
    capacity = usage[0]["total"] * tokens_per_unit if _has_pool(usage[0]) else 0.0
    if highest <= capacity <= highest * 4:  # a line far above would flatten the rest
        axes.axhline(capacity, color="black", linewidth=1, linestyle=(0, (4, 2)))
        highest = capacity
    axes.set_ylim(0, highest * 1.3 or 1)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=5, integer=True, steps=[1, 2, 2.5, 5, 10]))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.annotate(
        _kv_note(usage[-1]),
        (1, 1),
        xycoords="axes fraction",
        xytext=(-4, -3),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
    )


def legend_handles(
    records: list[dict[str, Any]], phases: set[str], has_glyphs: bool
) -> list[Patch | Line2D]:
    """One entry for each thing that occurs in the traces, and for nothing else."""
    styles = [style for phase, style in PHASE_STYLE.items() if phase in phases]
    styles.append(STORED_STYLE)
    if any(one["kv"]["reserved_tokens"] > one["kv"]["stored_tokens"] for one in records):
        styles.append(WASTE_STYLE)
    if any(one["kv"]["cached"] for one in records):
        styles.append(CACHED_STYLE)
    handles: list[Patch | Line2D] = [
        Patch(facecolor=s.fill, edgecolor=s.ink, hatch=s.hatch, linewidth=0.5, label=s.label)
        for s in styles
    ]
    kinds = {mark.kind for mark in request_marks(records)}
    for kind, (glyph, face) in MARKS.items():
        if kind == "finished" and kind in kinds:
            size, edge = 10.0, 2.0
        elif kind in kinds and has_glyphs:
            size, edge = 6.0, 0.8
        else:
            continue
        handle = Line2D([], [], linestyle="none", label=kind.replace("_", "-"))
        handle.set(marker=glyph, markersize=size, markeredgewidth=edge)
        handle.set(markerfacecolor=face, markeredgecolor="black")
        handles.append(handle)
    return handles


def _has_pool(kv: dict[str, Any]) -> bool:
    """False for m1_single, whose cache is counted in tokens and grows as needed."""
    return kv["unit"] != "token"


def _kv_note(kv: dict[str, Any]) -> str:
    amount = f"{kv['watermark']:,} of {kv['total']:,}" if _has_pool(kv) else f"{kv['watermark']:,}"
    return f"most ever used: {amount} {kv['unit']}s"


def _fill(
    axes: Axes, x: list[float], low: list[float], high: list[float], style: PhaseStyle
) -> None:
    axes.fill_between(
        x, low, high, facecolor=style.fill, edgecolor=style.ink, hatch=style.hatch, linewidth=0
    )


def _stairs_x(records: list[dict[str, Any]], extents: Extents) -> list[float]:
    return [end for record in records for end in extents[record["step"]]]


def _twice(values: list[Any]) -> list[float]:
    return [float(value) for value in values for _ in range(2)]


def _short(name: str) -> str:
    """Long ids keep both ends: what tells them apart is often at the end."""
    return name if len(name) <= _MAX_LABEL_LENGTH else f"{name[:5]}…{name[5 - _MAX_LABEL_LENGTH :]}"
