from __future__ import annotations

import math

SPAN = 20.0
"""Seconds over which the speed of the server is measured."""

EARLY = 0.85
"""Clients come a little faster than they are served: one too many is refused once more, one too few
leaves the server idle."""


class RetryAfter:
    """An appointment for each client, as far apart as the server needs for one."""

    def __init__(self) -> None:
        self._done: list[float] = []
        self._last_appointment = 0.0

    def finished(self, now: float) -> None:
        self._done.append(now)

    def seconds(self, now: float) -> int:
        recent = [time for time in self._done if time > now - SPAN]
        interval = (now - recent[0]) / len(recent) if recent else 1.0
        self._last_appointment = max(now, self._last_appointment) + EARLY * interval
        return min(600, max(1, math.floor(self._last_appointment - now)))
