"""`EngineCore` with what makes it safe and visible: failures, counts, records for those who watch.

A step whose forward raises ends its requests with `error`. After whatever else is raised, Ctrl-C
included, `restart` lets all requests go on: they keep their tokens, KV memory is given back and
computed again. So a step has happened or it has not.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from milestone_llm.core.engine_core import EngineCore, ModelRunner
from milestone_llm.core.kv import KVEvent
from milestone_llm.core.outputs import EngineCoreOutput, SampledToken
from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.scheduler import BaseScheduler

from .watching import SettledStep, StepWatcher


@dataclass(eq=False)
class StepNotes:
    """What is noted of a step between its plan and its record."""

    plan: StepPlan
    times: list[float]
    arrived: list[str]
    """Requests that came before it was planned and after the step before was."""
    events: list[KVEvent] = field(default_factory=list)
    sampled: dict[str, list[SampledToken]] = field(default_factory=dict)


class GuardedCore(EngineCore):
    """The core as an engine uses it. After each `step`, `close_steps` counts and records.

    Args:
        milestone: the package, for the records.
        tracer: the first of those who watch; None: nobody does.
        check_invariants: check after every step that no KV memory is lost.
    """

    def __init__(
        self,
        milestone: str,
        scheduler: BaseScheduler,
        runner: ModelRunner,
        tracer: StepWatcher | None = None,
        *,
        check_invariants: bool = False,
        can_run_ahead: Callable[[StepPlan], bool] | None = None,
    ) -> None:
        super().__init__(scheduler, runner, can_run_ahead)
        self.milestone = milestone
        self.watchers: list[StepWatcher] = [] if tracer is None else [tracer]
        self.check_invariants = check_invariants
        self.counts = dict.fromkeys(
            (
                "steps",
                "rows",
                "prefill_tokens",
                "decode_tokens",
                "padding_tokens",
                "recomputed_tokens",
                "finished",
            ),
            0,
        )
        self._once_computed: dict[str, int] = {}  # tokens of unfinished requests, by id
        self._gone: list[str] = []  # whose last step may not be counted yet
        self._arrived: list[str] = []
        self._ended: list[tuple[str, str]] = []  # (id, reason), not recorded yet
        self._newest: StepNotes | None = None  # of the last step that was planned
        self._open: deque[StepNotes] = deque()  # launched
        self._settled: deque[StepNotes] = deque()  # settled or failed, not counted yet

    # -- requests come and go ----------------------------------------------------------------

    def add_request(self, *requests: Request) -> None:
        """Queue a request with its further completions; the next steps compute them."""
        super().add_request(*requests)
        if self.watchers:
            self._arrived.append(requests[0].request_id)

    def finish_request(self, request: Request, reason: str) -> None:
        """End a request, in whatever state it is, for a reason that is not in its tokens."""
        self.scheduler.finish(request, reason)
        self._gone.append(request.request_id)
        if not self.scheduler.has_unfinished_requests():
            try:
                self.settle_until(0)
            except Exception:  # of a step whose requests have all ended: nobody is to be told
                self.restart([])

    def note_end(self, request_id: str, reason: str) -> None:
        """A completion has ended."""
        self.counts["finished"] += 1
        self._gone.append(request_id)
        if self.watchers:
            self._ended.append((request_id, reason))

    # -- the three parts of a step -----------------------------------------------------------

    def plan(self) -> StepPlan:
        """Plan a step. What happens to KV memory from here on belongs to it."""
        self._note_events()
        start = time.perf_counter()
        plan = super().plan()
        now = time.perf_counter()
        if not plan.is_empty:
            self._newest = StepNotes(plan, [start, now], self._arrived)
            self._arrived = []
        for request in plan.admitted:
            request.first_scheduled_time = request.first_scheduled_time or now
        return plan

    def launch(self, plan: StepPlan) -> None:
        """Start a step.

        Raises:
            Exception: what the forward raised. Its requests have ended then.
        """
        notes = self._newest
        assert notes is not None
        try:
            super().launch(plan)
        except Exception:
            with contextlib.suppress(Exception):
                self.settle_until(0)  # the step before is as good as ever
            self._fail(notes)
            raise
        if self.watchers:  # block tables as they are now
            for row in plan.rows:
                row.blocks = list(row.blocks)
        self._open.append(notes)
        step = self.in_flight[-1]
        step.launched = self._watched(step.launched, notes)

    def settle(self) -> list[EngineCoreOutput]:
        """Take in the tokens of the oldest step in flight.

        Raises:
            Exception: what the forward raised. Its requests have ended then.
        """
        outputs = super().settle()
        notes = self._open.popleft()
        notes.times.append(time.perf_counter())
        self._settled.append(notes)
        return outputs

    def _watched(self, launched: LaunchedStep, notes: StepNotes) -> LaunchedStep:
        def wait() -> dict[str, list[SampledToken]]:
            try:
                notes.sampled = launched.wait()
            except Exception:
                self._fail(notes)
                raise
            notes.times.append(time.perf_counter())
            return notes.sampled

        return LaunchedStep(wait)

    def _fail(self, notes: StepNotes) -> None:
        """End the requests of a step whose forward raised."""
        self.scheduler.fail(notes.plan)
        with contextlib.suppress(ValueError):
            self._open.remove(notes)
        notes.times += [time.perf_counter()] * (4 - len(notes.times))
        notes.sampled = {}
        self._settled.append(notes)

    # -- after a step ------------------------------------------------------------------------

    def close_steps(self) -> None:
        """Count, record and check the steps that have been settled.

        Called when their outputs have been processed: who ended by them belongs to their records.
        """
        while self._settled:
            notes = self._settled[0]
            self._count(notes.plan)
            if not self._open:
                self._note_events()  # nothing comes before the next step is planned
            if self.watchers:
                ended, self._ended = self._ended, []
                number, plan = self.counts["steps"] - 1, notes.plan
                step = SettledStep(
                    number, self.milestone, notes.times, plan, notes.sampled, ended, notes.events,
                    notes.arrived,
                )  # fmt: skip
                for watcher in list(self.watchers):
                    watcher.record(step, self.scheduler)
            self._settled.popleft()
            if self.check_invariants:
                self.scheduler.check_invariants()
        while self._gone:
            self._once_computed.pop(self._gone.pop(), None)

    def _count(self, plan: StepPlan) -> None:
        counts = self.counts
        counts["steps"] += 1
        counts["rows"] += len(plan.rows)
        counts["padding_tokens"] += plan.num_padding_tokens
        for row in plan.rows:
            if row.is_padding:
                continue
            counts[f"{row.phase}_tokens"] += row.num_new_tokens
            name, end = row.request.request_id, row.end
            before = self._once_computed.get(name, 0)
            if row.start < before:
                counts["recomputed_tokens"] += min(end, before) - row.start
            if row.request.is_finished:
                self._once_computed.pop(name, None)
            elif end > before:
                self._once_computed[name] = end

    def _note_events(self) -> None:
        """What happened to KV memory so far belongs to the last step that was planned."""
        events = self.scheduler.drain_events()
        if self._newest is not None:
            self._newest.events += events

    # -- interruptions -----------------------------------------------------------------------

    def restart(self, requests: Iterable[Request]) -> None:
        """Begin anew with these requests: their tokens are kept, their KV is not."""
        dropped = [name for notes in self._open for name in notes.arrived]
        self._arrived = dropped + self._arrived
        self.in_flight.clear()
        self._open.clear()
        self.scheduler.restart(requests)
        with contextlib.suppress(Exception):  # on a broken device the first error is the one
            self.runner.reset()
