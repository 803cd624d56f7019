"""The interfaces between engine, scheduler, runner and the trace."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

from .kv import KVEvent, KVUsage
from .plan import LaunchedStep, StepPlan
from .request import Request, SampledToken
from .request_queue import RequestQueue


class ModelRunner(Protocol):
    """Carries plans out. Owns the KV tensors."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. It may still run when this returns."""

    def collect(self, launched: LaunchedStep) -> dict[str, SampledToken]:
        """Wait for a step. One token for each request that samples, by id."""

    def reset(self) -> None:
        """Forget all requests, after an exception: nothing of them may reach later ones."""


class QueueState(Protocol):
    """What the trace may ask of a scheduler, at the end of a step."""

    waiting: RequestQueue
    running: list[Request]

    def kv_usage(self) -> KVUsage:
        """How full KV memory is."""


@dataclass(frozen=True)
class SettledStep:
    """A step whose tokens have been taken in, or which failed."""

    number: int
    milestone: str
    times: list[float]
    """Seconds of `time.perf_counter()` at start, after schedule, after execute, after update."""
    plan: StepPlan
    sampled: dict[str, SampledToken]
    finished: list[tuple[str, str]]
    """(request id, reason) of requests that ended since the step before, aborted ones included."""
    events: list[KVEvent]
    """Of this plan, and what followed until the next one was made."""
    arrived: list[str] = field(default_factory=list)
    """Requests that came since the step before was planned."""


class StepWatcher(Protocol):
    """Gets every step of an engine: a tracer."""

    def record(self, step: SettledStep, queues: QueueState) -> None:
        """Called once a step, at its end. Must not raise."""


class Peers(Protocol):
    """Engines in other processes that compute parts of the same model, and must plan the same."""

    def note_added(self, request: Request) -> None:
        """This engine was asked for a request."""

    def note_aborted(self, request_id: str) -> None:
        """This engine was asked to end one."""

    def agree(self, call: str) -> Iterator[Request | str]:
        """Before a `call` of all: requests to add, and ids of those to end, that came elsewhere."""

    def part(self) -> None:
        """What was raised has made this engine differ from the others."""
