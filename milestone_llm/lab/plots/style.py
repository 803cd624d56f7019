"""Colours, hatches and signs that mean the same in every picture. Needs no matplotlib.

Blue is useful work, hatched orange is waste (padded rows, reserved but empty KV), purple is a
request that lost its memory, green is KV. Each phase also has its own lightness and hatch, so a
picture reads in grey and with any colour vision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PhaseStyle:
    """How one phase is drawn: fill, hatch (matplotlib's letters) and the ink of hatch and edge.

    `thin_fill` replaces fill and hatch where bars are too thin for a hatch.
    """

    label: str
    fill: str
    hatch: str
    ink: str
    thin_fill: str = ""

    def area(self, **changes: Any) -> dict[str, Any]:
        """Keywords for matplotlib's filled shapes."""
        look = {"facecolor": self.fill, "edgecolor": self.ink, "hatch": self.hatch}
        return {**look, "linewidth": 0.0, "label": self.label, **changes}


PHASE_STYLE: dict[str, PhaseStyle] = {
    "waiting": PhaseStyle("waiting", "#efefef", "", "#c4c4c4", "#dadada"),
    "prefill": PhaseStyle("prefill", "#08519c", "", "#08519c"),
    "decode": PhaseStyle("decode", "#74b3e0", "", "#74b3e0", "#4a96cf"),
    "padding": PhaseStyle("padding (waste)", "#fbd5ae", "/////", "#d55e00", "#f9c894"),
    "preempted": PhaseStyle("preempted", "#e3c3dc", "xxxxx", "#8b3a7c", "#d79fca"),
    "swapped": PhaseStyle("swapped out", "#b98bb0", ".....", "#4f1d46", "#7d4a73"),
}
"""Ordered as the legend shows them. The fills alone differ in lightness; hatches tell the rest."""

STORED_STYLE = PhaseStyle("KV stored", "#3f9c8b", "", "#3f9c8b")
"""KV of tokens that are really there."""

WASTE_STYLE = PhaseStyle("KV reserved, empty (waste)", "#fbd5ae", "/////", "#d55e00")
"""KV that is reserved and holds no token: the same ink as padding, for both are waste."""

CACHED_STYLE = PhaseStyle("KV free, but cached", "#ffffff", "....", "#7a7a7a")
"""Free blocks whose content the prefix cache can still use."""

MARKS = {"preempted": "v", "resumed": "^", "copy_on_write": "D"}
"""Kind of event -> matplotlib's marker; `mark_style` gives the rest."""


def mark_style(kind: str, size: float) -> dict[str, Any]:
    """Keywords for `Axes.scatter`; `size` in square points."""
    look = {"facecolor": "white", "edgecolor": "black", "linewidth": 0.8, "zorder": 6}
    return {**look, "marker": MARKS[kind], "s": size, "label": kind.replace("_", "-")}
