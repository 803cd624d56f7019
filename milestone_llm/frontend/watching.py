"""What is told to those who watch an engine's steps, a tracer for one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from milestone_llm.core.kv import KVEvent
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.scheduler import BaseScheduler


@dataclass(frozen=True)
class SettledStep:
    """A step whose tokens have been taken in, or which failed."""

    number: int
    milestone: str
    times: list[float]
    """Seconds of `time.perf_counter()` at start, after schedule, after execute, after update."""
    plan: StepPlan
    sampled: dict[str, list[SampledToken]]
    finished: list[tuple[str, str]]
    """(request id, reason) of requests that ended since the step before, aborted ones included."""
    events: list[KVEvent]
    """Of this plan, and what followed until the next one was made."""
    arrived: list[str]
    """Requests that came since the step before was planned."""


class StepWatcher(Protocol):
    """Gets every step of an engine: a tracer."""

    def record(self, step: SettledStep, scheduler: BaseScheduler) -> None:
        """Called once a step, at its end, with its scheduler. Must not raise."""
