"""The colour of a request: the same in the terminal, in maps of blocks and in pictures."""

from __future__ import annotations

from rich.color import Color, blend_rgb
from rich.color_triplet import ColorTriplet

_HUES = ["#1b7fc4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#a6761d"]
"""Okabe and Ito's colour-blind-safe set, for dark and light terminals alike: its blue is a little
lighter here, purple and brown stand for its yellow and black."""

_WHITE, _BLACK = ColorTriplet(255, 255, 255), ColorTriplet(0, 0, 0)


def request_color(index: int) -> str:
    """The colour of the `index`-th request (0 is the first to appear) as `#rrggbb`.

    Eight hues, then the same hues lighter and darker; after 24 requests they repeat.
    """
    hue = Color.parse(_HUES[index % len(_HUES)]).get_truecolor()
    target, share = ((_BLACK, 0.0), (_WHITE, 0.45), (_BLACK, 0.35))[index // len(_HUES) % 3]
    return blend_rgb(hue, target, share).hex
