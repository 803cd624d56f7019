"""What `kvmap` draws on its axes: bars of blocks, names in them, marks, and the legend of it all.

x is the step, y the block number; step 7 reaches from 6.5 to 7.5, and block 3 from 2.5 to 3.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from .block_history import BlockRun
from .timeline_panels import MARKS

Polygon = list[tuple[float, float]]
Colors = Mapping[str, str]
"""Request -> colour."""

Area = tuple[list[int], int, int, str]
"""Blocks, first and last state, and the name to write there."""

MAX_LEGEND = 24
"""Request colours repeat after this many."""
_MAX_MARKS = 60
_MIN_FONT_SIZE = 5.5
_FRAME = "black"


@dataclass(frozen=True)
class Scale:
    """Inches of a step and of a block, for what must be large enough to read."""

    step: float
    block: float

    @property
    def half_bar(self) -> float:
        """Half the thickness of a bar, in blocks; thin ones can spare no gap."""
        return 0.43 if self.block > 0.05 else 0.5


def draw_bars(
    axes: Axes, runs: Sequence[BlockRun], steps: Sequence[int], size: int, colors: Colors, at: Scale
) -> None:
    """A pale bar for each run; the solid part in it grows with the tokens stored.

    Args:
        steps: step number of each state.
        size: tokens of a block.
    """
    half = at.half_bar
    boxes: list[Polygon] = []
    fills: list[Polygon] = []
    faces: list[str] = []
    stripe = max(1, round(0.09 / at.step))  # steps that a shared block shows one owner's colour
    for run in runs:
        length = stripe if len(run.owners) > 1 else len(run.stored)
        for number, first in enumerate(range(run.first, run.last + 1, length)):
            own = slice(first, min(first + length, run.last + 1))
            stored = run.stored[own.start - run.first : own.stop - run.first]
            boxes.append(_box(steps[own], run.block, half))
            fills.append(_stairs(steps[own], [tokens / size for tokens in stored], run.block, half))
            faces.append(colors[run.owners[number % len(run.owners)]])
    pale = [tuple(0.25 * channel + 0.75 for channel in to_rgb(face)) for face in faces]
    axes.add_collection(PolyCollection(boxes, facecolors=pale, linewidths=0))
    axes.add_collection(PolyCollection(fills, facecolors=faces, linewidths=0))
    # Where one owner follows another, a gap: in grey the two might look alike.
    starts = [(steps[run.first] - 0.5, run.block) for run in runs]
    gaps = [[(x, block - 0.5), (x, block + 0.5)] for x, block in starts]
    axes.add_collection(LineCollection(gaps, colors="white", linewidths=min(1.4, 20 * at.block)))
    shared = [run for run in runs if len(run.owners) > 1]
    frames = [_box(steps[run.first : run.last + 1], run.block, half) for run in shared]
    axes.add_collection(
        PolyCollection(frames, facecolors="none", edgecolors=_FRAME, linewidths=1, zorder=3)
    )


def _box(steps: Sequence[int], block: int, half: float) -> Polygon:
    left, right = steps[0] - 0.5, steps[-1] + 0.5
    return [
        (left, block - half),
        (right, block - half),
        (right, block + half),
        (left, block + half),
    ]


def _stairs(steps: Sequence[int], shares: Sequence[float], block: int, half: float) -> Polygon:
    """From the bar's lower edge up to the share of the block that is filled, step by step."""
    low = block + half
    tops: Polygon = []
    for step, share in zip(steps, shares, strict=True):
        tops += [(step - 0.5, low - 2 * half * share), (step + 0.5, low - 2 * half * share)]
    return [(steps[0] - 0.5, low), *tops, (steps[-1] + 0.5, low)]


def draw_names(axes: Axes, runs: Sequence[BlockRun], steps: Sequence[int], at: Scale) -> None:
    """The owner's id in every bar that has room for it; else in the largest areas."""
    areas = [([run.block], run.first, run.last, " ".join(run.owners)) for run in runs]
    if _font_size(1, at) < _MIN_FONT_SIZE:  # no bar is thick enough
        areas = [area for stay in _stays(runs) if (area := _largest_area(stay, at))]
    for blocks, first, last, name in areas:
        if _fits(name, len(blocks), last - first + 1, at):
            axes.text(
                (steps[first] + steps[last]) / 2,
                (blocks[0] + blocks[-1]) / 2,
                name,
                ha="center",
                va="center_baseline",
                fontsize=_font_size(len(blocks), at),
                fontweight="bold",
                color="white",
                path_effects=[withStroke(linewidth=1.5, foreground="#222222")],
                zorder=5,
            )


def _fits(name: str, num_blocks: int, num_steps: int, at: Scale) -> bool:
    size = _font_size(num_blocks, at)
    width = (0.7 * len(name) + 0.6) * size / 72
    return size >= _MIN_FONT_SIZE and num_steps * at.step >= width


def _font_size(num_blocks: int, at: Scale) -> float:
    """Points that so many blocks above one another have room for; 10 at most."""
    return min(10.0, num_blocks * at.block * 72 * 0.62)


def _stays(runs: Sequence[BlockRun]) -> list[list[BlockRun]]:
    """Unshared runs by request, parted where it held no block at all (it was preempted)."""
    by_request: dict[str, list[BlockRun]] = {}
    for run in sorted(runs, key=lambda run: run.first):
        if len(run.owners) == 1:
            by_request.setdefault(run.owners[0], []).append(run)
    stays = []
    for own in by_request.values():
        stay, last = [own[0]], own[0].last
        for run in own[1:]:
            if run.first > last + 1:
                stays.append(stay)
                stay = []
            stay.append(run)
            last = max(last, run.last)
        stays.append(stay)
    return stays


def _largest_area(stay: Sequence[BlockRun], at: Scale) -> Area | None:
    """Consecutive blocks, and the states in which all of them are the request's.

    None if its name would fit into no such area.
    """
    best, best_area = None, 0.0
    ordered = sorted(stay, key=lambda run: run.block)
    for index, start in enumerate(ordered):
        first, last = start.first, start.last
        blocks: list[int] = []
        for run in ordered[index : index + 64]:
            if blocks and run.block != blocks[-1] + 1:
                break
            blocks.append(run.block)
            first, last = max(first, run.first), min(last, run.last)
            width = (last - first + 1) * at.step
            area = width * min(len(blocks) * at.block, 3 * width)
            if area > best_area and _fits(run.owners[0], len(blocks), last - first + 1, at):
                best, best_area = (list(blocks), first, last, run.owners[0]), area
    return best


def draw_marks(axes: Axes, records: Sequence[Mapping[str, Any]], at: Scale) -> set[str]:
    """Who was preempted or resumed, above the map; copies where the new block begins.

    Returns:
        The kinds that were drawn.
    """
    points: dict[str, list[tuple[float, float, str]]] = {}
    for record in records:
        step = float(record["step"])
        for entry in record["preempted"]:
            points.setdefault("preempted", []).append((step, 1.0, entry["request_id"]))
        for name in record["resumed"]:
            points.setdefault("resumed", []).append((step, 1.0, name))
        for event in record["events"]:
            if event["type"] == "copy_on_write":
                points.setdefault("copy_on_write", []).append((step, event["blocks"][-1], ""))
    above = points.get("preempted", []) + points.get("resumed", [])
    for kind, own in points.items():
        glyph, face = MARKS[kind]
        is_above = kind != "copy_on_write"
        axes.scatter(
            [x for x, _, _ in own],
            [1.0 if is_above else y for _, y, _ in own],
            s=30 if len(above) <= _MAX_MARKS else 8,
            marker=glyph,
            facecolor=face,
            edgecolor="black",
            linewidth=0.8,
            transform=axes.get_xaxis_transform() if is_above else axes.transData,
            clip_on=False,
            zorder=6,
        )
    free_from = float("-inf")
    for x, _, name in sorted(above):
        width = (0.085 * len(name) + 0.03) / at.step  # in steps
        if x - width / 2 >= free_from:  # a name that would cover its neighbour is left out
            axes.annotate(
                name,
                (x, 1.0),
                xycoords=axes.get_xaxis_transform(),
                xytext=(0, 5),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                annotation_clip=False,
            )
            free_from = x + width / 2
    return set(points)


def legend_handles(
    order: Sequence[str], colors: Colors, is_shared: bool, kinds: set[str]
) -> list[Patch | Line2D]:
    """Requests in the order of their arrival, then what else occurs in the map."""
    shown = order if len(order) <= MAX_LEGEND else order[: MAX_LEGEND - 1]
    handles: list[Patch | Line2D] = [Patch(facecolor=colors[name], label=name) for name in shown]
    if len(order) > len(shown):
        handles.append(Patch(facecolor="none", label=f"{len(order) - len(shown)} more"))
    handles.append(Patch(facecolor="#d8d8d8", label="reserved, empty"))
    handles.append(Patch(facecolor="white", edgecolor="#c4c4c4", linewidth=0.8, label="free"))
    if is_shared:
        handles.append(Patch(facecolor="none", edgecolor=_FRAME, label="shared (striped)"))
    for kind in sorted(kinds, key=list(MARKS).index):
        glyph, face = MARKS[kind]
        handle = Line2D([], [], linestyle="none", label=kind.replace("_", "-"))
        handle.set(marker=glyph, markersize=6, markeredgewidth=0.8)
        handle.set(markerfacecolor=face, markeredgecolor="black")
        handles.append(handle)
    return handles
