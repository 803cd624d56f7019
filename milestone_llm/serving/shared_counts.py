"""What HTTP's processes count together: limits hold for all of them, and `/metrics` shows one sum.

Each process writes a row of its own, in memory that all of them see, and reads all rows. So nothing
is locked, and what a process has counted outlives it.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from enum import IntEnum, auto
from typing import TYPE_CHECKING

from . import processes
from .engine_metrics import SECONDS, TOKENS, Histogram

if TYPE_CHECKING:
    from milestone_llm.frontend.output_processor import RequestState

DELIVERY_SECONDS = (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
DELIVERY = "token_delivery_seconds"
HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "e2e_request_latency_seconds": ("from a request's arrival to its end", SECONDS),
    "request_prompt_tokens": ("prompt tokens of a request", TOKENS),
    "request_generation_tokens": ("output tokens of a request", TOKENS),
    DELIVERY: ("from a step's end until its tokens are in a stream's socket", DELIVERY_SECONDS),
}
"""What each says, and its bounds."""


class Count(IntEnum):
    """What is counted: the place in a row."""

    COMPLETIONS = 0
    """That run or wait."""
    REQUESTS = auto()
    """API requests that wait for an answer, or for more of it."""
    CONNECTIONS = auto()
    BODY_BYTES = auto()
    """Of bodies that are read or answered, but for the first of each."""
    PAGES = auto()
    """That watch the engine's steps."""
    REFUSED = auto()
    """Requests that were told to come later, since the server's start."""
    GENERATION_TOKENS = auto()
    """Of answers, since then: none that came after a stop string."""
    STOP = auto()
    """Requests that have ended so, since then."""
    LENGTH = auto()
    ABORT = auto()
    ERROR = auto()


ENDS = {each.name.lower(): each for each in (Count.STOP, Count.LENGTH, Count.ABORT, Count.ERROR)}
"""By reason."""
_STARTS = list(
    itertools.accumulate(
        (Histogram.num_cells(bounds) for _, bounds in HISTOGRAMS.values()), initial=len(Count)
    )
)
"""Of the cells of each histogram in a row, and the row's end."""
NUM_CELLS = _STARTS[-1]


class SharedCounts:
    """Memory that the server's processes share. Can be given to a process that is started."""

    def __init__(self, num_processes: int = 1) -> None:
        self.num_processes = num_processes
        self.last_beat = processes.CONTEXT.RawValue("d", time.monotonic())
        """When the engine's process has last said that it lives."""
        self._cells = processes.CONTEXT.RawArray("d", num_processes * NUM_CELLS)

    def of(self, number: int) -> HttpCounts:
        """Those that one of HTTP's processes writes."""
        cells = memoryview(self._cells).cast("B").cast("d")
        starts = range(0, len(cells), NUM_CELLS)
        return HttpCounts([cells[start : start + NUM_CELLS] for start in starts], number)


class HttpCounts:
    """What one of HTTP's processes counts, and the sums of all. Written in HTTP's thread alone.

    Args:
        rows: of all processes.
        number: of this one.
    """

    def __init__(self, rows: Sequence[memoryview[float]], number: int) -> None:
        self._rows, self._own = rows, rows[number]
        self._histograms = _histograms(self._own)

    def add(self, count: Count, number: int) -> None:
        """Count so many more, or fewer."""
        self._own[count] += number

    def total(self, count: Count) -> int:
        """As many as there are in all processes."""
        return int(sum(row[count] for row in self._rows))

    def histograms(self) -> dict[str, Histogram]:
        """Of all processes together, by name."""
        return _histograms([sum(column) for column in zip(*self._rows, strict=True)])

    def note_delivery(self, seconds: float) -> None:
        """An event is in its stream's socket, so long after the end of a step."""
        self._histograms[DELIVERY].observe(seconds)

    def note_end(self, state: RequestState, arrival_time: float) -> None:
        """A request has ended with all of its completions, for whatever reason.

        Args:
            arrival_time: when the client asked, in seconds of `time.perf_counter()`.
        """
        reasons = [completion.finish_reason or "abort" for completion in state.completions]
        reason = "error" if "error" in reasons else reasons[0]
        self.add(ENDS[reason], 1)
        if reason in ("abort", "error"):
            return
        num_tokens = sum(len(completion.token_ids) for completion in state.completions)
        for name, value in (
            ("e2e_request_latency_seconds", time.perf_counter() - arrival_time),
            ("request_prompt_tokens", len(state.prompt_token_ids)),
            ("request_generation_tokens", num_tokens),
        ):
            self._histograms[name].observe(value)


def _histograms(row: list[float] | memoryview[float]) -> dict[str, Histogram]:
    """Those in a row of cells."""
    return {
        name: Histogram(bounds, row[start:end])
        for (name, (_, bounds)), (start, end) in zip(
            HISTOGRAMS.items(), itertools.pairwise(_STARTS), strict=True
        )
    }
