"""An engine's log of its steps: counts, times, and records for watchers such as a tracer."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from milestone_llm.core.engine_core import StepInFlight, StepListener
from milestone_llm.core.kv import KVEvent, copy_of
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.scheduler import BaseScheduler

ReadFigures = Callable[[], dict[str, object]]
BeginFigures = Callable[[StepPlan], ReadFigures]
"""Begins to read figures of a step that was just launched, without waiting for it."""


@dataclass(eq=False)
class LoggedStep:
    """Notes on a step, from its plan on until its tokens are taken in, or the step has failed."""

    plan: StepPlan
    times: list[float]
    """Seconds of `time.perf_counter()` at start, after schedule, after execute, after update."""
    arrived: list[str]
    """Requests that came after the step before was planned and before this step was."""
    events: list[KVEvent] = field(default_factory=list)
    """Changes of KV memory from the making of this plan to the making of the next."""
    sampled: dict[str, list[SampledToken]] = field(default_factory=dict)
    number: int = -1
    milestone: str = ""
    read_figures: ReadFigures = dict
    """Waits for further figures of the step, and returns them by the name of the record's field."""
    figures: dict[str, object] = field(default_factory=dict)
    finished: list[tuple[str, str]] = field(default_factory=list)
    """(request id, reason) of requests that ended since the step before, aborted ones included."""


class StepWatcher(Protocol):
    """Gets every step of an engine: a tracer."""

    def record(self, step: LoggedStep, scheduler: BaseScheduler) -> None:
        """Take note of a step. Called once a step, at its end. Must not raise."""


class RecomputedPositions:
    """Counts positions that are computed again, since a preempted request loses its KV."""

    def __init__(self) -> None:
        self.ends: dict[str, int] = {}
        """How far each unfinished request has been computed, by id."""

    def take(self, request_id: str, start: int, end: int) -> int:
        """Note that positions `start .. end - 1` of a request are computed; return how many of them
        had been computed before."""
        before = self.ends.get(request_id, 0)
        if end > before:
            self.ends[request_id] = end
        return min(end, before) - start if start < before else 0

    def forget(self, request_id: str) -> None:
        """Forget a request that has ended: its id may come again."""
        self.ends.pop(request_id, None)


class StepLog(StepListener):
    """Listens to a core. After each step, `close_steps` counts and records what has been settled.

    Args:
        milestone: the package's name, for the records.
        scheduler: the core's scheduler.
        tracer: the first watcher; None: there is none.
        check_invariants: check after every step that no KV memory is lost.
    """

    def __init__(
        self,
        milestone: str,
        scheduler: BaseScheduler,
        tracer: StepWatcher | None = None,
        check_invariants: bool = False,
    ) -> None:
        self.milestone = milestone
        self.scheduler = scheduler
        self.watchers: list[StepWatcher] = [] if tracer is None else [tracer]
        self.check_invariants = check_invariants
        self.begin_figures: BeginFigures | None = None
        """Called for steps that are recorded; None: their records have no further figures."""
        self.counts = {
            "steps": 0,
            "rows": 0,
            "prefill_tokens": 0,
            "decode_tokens": 0,
            "padding_tokens": 0,
            "recomputed_tokens": 0,
            "finished": 0,
        }
        self._recomputed = RecomputedPositions()
        self._gone: list[str] = []  # ended requests whose last step may not be counted yet
        self._arrived: list[str] = []
        self._ended: list[tuple[str, str]] = []  # (id, reason), not recorded yet
        self._planning_began = 0.0
        self._newest: LoggedStep | None = None  # the last step that was planned
        self._open: deque[LoggedStep] = deque()  # launched, as `EngineCore.in_flight`
        self._settled: deque[LoggedStep] = deque()  # settled or failed, not counted yet

    def watch(self, watcher: StepWatcher) -> None:
        """Give the steps from now on to a watcher, too."""
        self.watchers.append(watcher)

    def unwatch(self, watcher: StepWatcher) -> None:
        """Give no more steps to a watcher."""
        self.watchers.remove(watcher)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Neither count nor record the steps made inside the block: a warm-up."""
        counts, watchers = dict(self.counts), self.watchers
        self.watchers = []
        try:
            yield
        finally:
            self.watchers = watchers
            self.counts.update(counts)
            self.scheduler.watermark = 0

    # -- requests come and go ----------------------------------------------------------------

    def added(self, requests: Sequence[Request]) -> None:
        """Note that the completions of a prompt have been queued."""
        if self.watchers:
            self._arrived.append(requests[0].request_id)

    def finished(self, request: Request) -> None:
        """Note that a request has been ended for a reason that is not in its tokens."""
        self._gone.append(request.request_id)

    def ended(self, request_id: str, reason: str) -> None:
        """Note that a completion has ended for its caller, by a stop string for instance."""
        self.counts["finished"] += 1
        self._gone.append(request_id)
        if self.watchers:
            self._ended.append((request_id, reason))

    # -- how a step goes on ------------------------------------------------------------------

    def planning(self) -> None:
        """Note that a step is about to be planned. Changes of KV memory from here on belong to this
        step."""
        self._note_events()
        self._planning_began = time.perf_counter()

    def planned(self, plan: StepPlan) -> None:
        """Note that a step has been planned."""
        now = time.perf_counter()
        if not plan.is_empty:
            self._newest = LoggedStep(plan, [self._planning_began, now], self._arrived)
            self._arrived = []
        for request in plan.admitted:
            request.first_scheduled_time = request.first_scheduled_time or now

    def launched(self, step: StepInFlight) -> None:
        """Note that a step has begun."""
        assert self._newest is not None
        if self.watchers:  # block tables as they are now
            for row in step.plan.rows:
                row.blocks = copy_of(row.blocks)
            if self.begin_figures is not None:
                self._newest.read_figures = self.begin_figures(step.plan)
        self._open.append(self._newest)

    def computed(self, step: StepInFlight, sampled: dict[str, list[SampledToken]]) -> None:
        """Note that the tokens of the oldest step in flight are there."""
        self._open[0].sampled = sampled
        self._open[0].figures = self._open[0].read_figures()
        self._open[0].times.append(time.perf_counter())

    def settled(self, step: StepInFlight) -> None:
        """Note that the requests of a step have taken their tokens in."""
        notes = self._open.popleft()
        notes.times.append(time.perf_counter())
        self._settled.append(notes)

    def failed(self, plan: StepPlan) -> None:
        """Note that the forward of a step has raised, at its launch or when its tokens were due."""
        for notes in (*self._open, self._newest):
            if notes is not None and notes.plan is plan:
                if notes in self._open:
                    self._open.remove(notes)
                notes.times += [time.perf_counter()] * (4 - len(notes.times))
                self._settled.append(notes)
                return

    def restarted(self) -> None:
        """Note that the steps in flight have been dropped."""
        dropped = [name for notes in self._open for name in notes.arrived]
        self._arrived = dropped + self._arrived
        self._open.clear()

    # -- after a step ------------------------------------------------------------------------

    def close_steps(self) -> None:
        """Count, record and check the steps that have been settled.

        Called after their outputs have been processed: requests that these outputs ended belong in
        the steps' records.
        """
        while self._settled:
            step = self._settled[0]
            self._count(step.plan)
            if not self._open:
                self._note_events()  # nothing comes before the next step is planned
            if self.watchers:
                step.number, step.milestone = self.counts["steps"] - 1, self.milestone
                step.finished += self._ended
                self._ended = []
                for watcher in list(self.watchers):
                    watcher.record(step, self.scheduler)
            self._settled.popleft()
            if self.check_invariants:
                self.scheduler.check_invariants()
        while self._gone:
            self._recomputed.forget(self._gone.pop())

    def _count(self, plan: StepPlan) -> None:
        counts = self.counts
        counts["steps"] += 1
        counts["rows"] += len(plan.rows)
        counts["padding_tokens"] += plan.num_padding_tokens
        for row in plan.rows:
            if row.is_padding:
                continue
            counts[f"{row.phase}_tokens"] += row.num_new_tokens
            name = row.request.request_id
            counts["recomputed_tokens"] += self._recomputed.take(name, row.start, row.end)
            if row.request.finish_reason is not None:
                self._recomputed.forget(name)

    def _note_events(self) -> None:
        """Give the changes of KV memory so far to the last step that was planned."""
        events = self.scheduler.drain_events()
        if self._newest is not None:
            self._newest.events += events
