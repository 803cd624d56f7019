"""What HTTP's processes count together: limits hold for all of them, and `/metrics` shows one sum.

Each process writes a row of its own, in memory that all of them see, and reads all rows. So nothing
is locked, and what a process has counted outlives it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from enum import IntEnum, auto

from . import processes
from .engine_metrics import Histogram

DELIVERY_SECONDS = (2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


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
    DELIVERY = auto()
    """The first of the cells of a histogram."""


NUM_CELLS = Count.DELIVERY + Histogram.num_cells(DELIVERY_SECONDS)


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
        self.delivery = Histogram(DELIVERY_SECONDS, self._own[Count.DELIVERY :])
        """From the end of a step to a stream's socket, of each event of this process."""

    def add(self, count: Count, number: int) -> None:
        """Count so many more, or fewer."""
        self._own[count] += number

    def total(self, count: Count) -> int:
        """As many as there are in all processes."""
        return int(sum(row[count] for row in self._rows))

    def all_deliveries(self) -> Histogram:
        """`delivery` of all processes."""
        cells = [sum(column) for column in zip(*self._rows, strict=True)]
        return Histogram(DELIVERY_SECONDS, cells[Count.DELIVERY :])
