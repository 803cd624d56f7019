"""Colours and hatches that mean the same in every picture and every terminal table.

In a picture blue is useful work, hatched orange is waste (padded rows, reserved but empty KV),
purple is a request that lost its memory, green is KV. Each phase also has its own lightness and
hatch, so a picture reads in grey and with any colour vision. A request's own colour (terminal,
block maps) comes from `request_color`. The module needs no matplotlib.
"""

from __future__ import annotations

from dataclasses import dataclass


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

_HUES = (
    "#1b7fc4",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#8c6bb1",
    "#a6761d",
)
"""Okabe and Ito's colour-blind-safe set, for dark and light terminals alike: its blue is a little
lighter here, purple and brown stand for its yellow and black."""


def request_color(index: int) -> str:
    """The colour of the `index`-th request (0 is the first to appear) as `#rrggbb`.

    Eight hues, then the same hues lighter and darker; after 24 requests they repeat.
    """
    hue, round_number = _HUES[index % len(_HUES)], index // len(_HUES) % 3
    target, share = ((0, 0.0), (255, 0.45), (0, 0.35))[round_number]
    channels = [int(hue[at : at + 2], 16) for at in (1, 3, 5)]
    mixed = [round(channel + (target - channel) * share) for channel in channels]
    return "#" + "".join(f"{channel:02x}" for channel in mixed)
