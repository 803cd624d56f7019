"""The page of a run inside of a notebook: `explore(engine)` as the last line of a cell."""

from __future__ import annotations

import html
from typing import Any

from milestone_llm.core.errors import InputError

from .explorer.page import Run, explorer_html


class Page:
    """A page that Jupyter shows in a frame, with scripts of its own."""

    def __init__(self, text: str, height: int) -> None:
        self.text = text
        self.height = height

    def _repr_html_(self) -> str:
        source = html.escape(self.text)
        style = f"width: 100%; height: {self.height}px; border: 0"
        return f'<iframe srcdoc="{source}" style="{style}"></iframe>'


def explore(*engines: Any, height: int = 700) -> Page:
    """Return the page of what one engine has just run, or two next to each other.

    Args:
        engines: made with `trace="memory"`, or another trace.
        height: of the frame, in pixels.

    Raises:
        InputError: there are more than two, or one has no trace or no steps yet.
    """
    if not 1 <= len(engines) <= 2:
        raise InputError(f"a page shows one or two engines, got {len(engines)}")
    for engine in engines:
        if engine.tracer is None or not engine.tracer.records:
            raise InputError(
                f"{engine!r} has recorded no steps: make it with trace='memory', and let it run"
            )
    return Page(explorer_html([Run.of(each.milestone, each) for each in engines]), height)
