"""The step loop: plan, launch, settle. Written once, for all milestones.

    plan     scheduler.schedule()      who computes which tokens
    launch   runner.launch(plan)       the forward begins
    settle   runner.collect(...)       its tokens are there
             scheduler.update(...)     requests take them in, some finish

M1 to M4 settle a step at once. M5 settles it after the next one has been launched, so that the GPU
has work while Python plans: `num_steps_ahead()` is 1 there, and all else is the same.

What happens when something is raised, Ctrl-C included: an exception in the forward ends the step's
requests with `error`. Whatever is raised, and wherever, all other requests keep their tokens; KV
memory is given back and computed again. So a step has happened or it has not.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from .exclusive import Exclusive
from .inputs import check_request_id
from .kv import KVEvent
from .outbox import Outbox, Reader
from .outputs import RequestOutput
from .plan import LaunchedStep, StepPlan
from .protocols import ModelRunner, Peers, SettledStep, StepWatcher
from .request import Request, SampledToken
from .scheduler import BaseScheduler


@dataclass
class StepInFlight:
    """A step that was launched and whose tokens have not been taken in."""

    plan: StepPlan
    times: list[float]
    num_arrived: int
    """Requests that came before it was planned, beyond those that have been recorded."""
    num_events_before: int
    """Events that happened before it was planned, beyond those that have been recorded."""
    launched: LaunchedStep | None = None


class StepLoop:
    """Requests in, outputs into the outbox.

    Args:
        num_steps_ahead: launched steps that may be left to settle when `step` returns.
        check_invariants: check after every step that no KV memory is lost.
        peers: engines elsewhere that take the same steps (m5_kernels on several GPUs).
    """

    def __init__(
        self,
        milestone: str,
        scheduler: BaseScheduler,
        runner: ModelRunner,
        tracer: StepWatcher | None,
        num_steps_ahead: Callable[[], int],
        check_invariants: bool,
        peers: Peers | None = None,
    ) -> None:
        self.milestone = milestone
        self.scheduler = scheduler
        self.runner = runner
        self.tracer = tracer
        self.num_steps_ahead = num_steps_ahead
        self.check_invariants = check_invariants
        self.peers = peers
        self.requests: dict[str, Request] = {}
        """Unfinished ones, without further completions. The truth after an interruption."""
        self.outbox = Outbox()
        self.in_flight: deque[StepInFlight] = deque()
        self.counts = dict.fromkeys(
            (
                *("steps", "rows", "prefill_tokens", "decode_tokens", "padding_tokens"),
                *("recomputed_tokens", "finished"),
            ),
            0,
        )
        self._arrived: list[str] = []  # not recorded yet, for the trace; so is what follows
        self._ended: list[tuple[str, str]] = []  # (id, reason)
        self._to_abort: list[str] = []
        self._exclusive = Exclusive(self._restart)

    # -- requests come and go ----------------------------------------------------------------

    def add(self, requests: list[Request], reader: Reader | None) -> None:
        """Queue requests; from here on they are the loop's.

        Raises:
            ValueError: another thread was faster with the same id; nothing has been queued then.
        """
        self._exclusive.run(lambda: self._add(requests, reader))

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request in whatever state it is; None if it is not (or no longer) known."""
        if self._exclusive.is_inside():  # a forgotten iterator of `stream` ends in mid-step
            self._to_abort.append(request_id)
            return None
        return self._exclusive.run(lambda: self._abort(request_id))

    def step(self) -> None:
        """Plan and launch a step, settle those that are due. Outputs go to the outbox."""
        self._exclusive.run(self._step)

    def _add(self, requests: list[Request], reader: Reader | None) -> None:
        for request in requests:
            check_request_id(request.request_id, self.is_taken)
        for request in requests:
            request.reader = reader
            self.requests[request.request_id] = request
            if reader is not None:
                reader.num_unfinished += 1
            self.scheduler.add(request)
            if self.peers is not None:
                self.peers.note_added(request)
            if self.tracer is not None:
                self._arrived.append(request.request_id)

    def _abort(self, request_id: str) -> RequestOutput | None:
        request = self.requests.get(request_id)
        if request is None:
            return None
        if self.peers is not None:
            self.peers.note_aborted(request_id)
        for completion in reversed(request.completions):  # forks before what they fork from
            if not completion.is_finished:
                self.scheduler.abort(completion)
        self._note_ends(request)
        if not self.requests:
            self._settle_all()  # what is under way is for nobody
        return RequestOutput.from_request(request)

    def is_taken(self, request_id: str) -> bool:
        """Whether an id belongs to a request, or completion, that is unfinished or undelivered."""
        if request_id in self.requests or self.outbox.holds(request_id):
            return True
        parent = self.requests.get(request_id.rpartition("/")[0])
        return parent is not None and any(
            completion.request_id == request_id for completion in parent.completions
        )

    def _note_ends(self, leader: Request) -> None:
        """Count completions that have ended; forget a request all of whose have."""
        for completion in leader.completions:
            if completion.is_finished and not completion.is_counted:
                completion.is_counted = True
                self.counts["finished"] += 1
                if self.tracer is not None:
                    self._ended.append((completion.request_id, str(completion.finish_reason)))
        if leader.is_done:
            if leader.reader is not None:
                leader.reader.num_unfinished -= 1
            del self.requests[leader.request_id]

    # -- a step ------------------------------------------------------------------------------

    def agree(self, call: str) -> None:
        """Before a `call` of this engine and its peers: what came to one of them comes to all."""
        self._exclusive.run(lambda: self._agree(call))

    def _agree(self, call: str) -> None:
        if self.peers is not None:
            for change in self.peers.agree(call):
                if isinstance(change, Request):
                    self._add([change], None)
                else:
                    self._abort(change)

    def _step(self) -> None:
        while self._to_abort:
            self._abort(self._to_abort.pop())
        self._agree("step")
        while len(self.in_flight) > self.num_steps_ahead():
            self._settle()  # a request has come whose tokens must be known at once
        is_launched = bool(self.requests) and self._launch()
        num_ahead = self.num_steps_ahead() if is_launched else 0
        while len(self.in_flight) > num_ahead:
            self._settle()
        if not self.requests:
            self._settle_all()  # what is under way is for nobody

    def _launch(self) -> bool:
        """Plan a step and start it. False if nothing can be computed before tokens come back."""
        num_events_before = len(self.scheduler.events)
        times = [time.perf_counter()]
        plan = self.scheduler.schedule()
        times.append(time.perf_counter())
        step = StepInFlight(plan, times, len(self._arrived), num_events_before)
        if plan.is_empty:
            assert self.in_flight, "the scheduler has unfinished requests but plans nothing"
            return False
        for request in plan.admitted:
            if request.metrics.first_scheduled_time is None:
                request.metrics.first_scheduled_time = times[-1]
        try:
            step.launched = self.runner.launch(plan)
        except Exception:
            with contextlib.suppress(Exception):
                self._settle_all()  # the step before is as good as ever
            self._fail(step)
            raise
        self.scheduler.mark_launched(plan)
        if self.tracer is not None:  # block tables as they are now
            for row in plan.rows:
                row.blocks = list(row.blocks)
        self.in_flight.append(step)
        return True

    def _settle(self) -> None:
        """Wait for the oldest step under way and take in its tokens."""
        step = self.in_flight.popleft()
        assert step.launched is not None
        try:
            sampled = self.runner.collect(step.launched)
        except Exception:
            self._fail(step)
            raise
        step.times.append(time.perf_counter())
        outputs = self.scheduler.update(step.plan, sampled)
        step.times.append(time.perf_counter())
        self._close_step(step, sampled, outputs)

    def _settle_all(self) -> None:
        while self.in_flight:
            self._settle()

    def _fail(self, step: StepInFlight) -> None:
        """End the requests of a step whose forward raised."""
        outputs = self.scheduler.fail(step.plan)
        step.times += [time.perf_counter()] * (4 - len(step.times))
        self._close_step(step, {}, outputs)

    def _close_step(
        self,
        step: StepInFlight,
        sampled: dict[str, SampledToken],
        outputs: list[RequestOutput],
    ) -> None:
        """Deliver, count, record and check what the step did."""
        plan = step.plan
        for output in outputs:
            leader = self.requests[output.request_id]
            self.outbox.put(output, leader.reader)
            self._note_ends(leader)
        num_decode_tokens = sum(row.phase == "decode" for row in plan.rows)
        counts = self.counts
        counts["steps"] += 1
        counts["rows"] += len(plan.rows)
        counts["prefill_tokens"] += plan.num_tokens - num_decode_tokens
        counts["decode_tokens"] += num_decode_tokens
        counts["padding_tokens"] += plan.num_padding_tokens
        for row in plan.rows:
            if not row.is_padding:
                request, again = row.request, min(row.end, row.request.num_once_computed)
                counts["recomputed_tokens"] += max(0, again - row.start)
                request.num_once_computed = max(row.end, request.num_once_computed)
        # What happens to KV memory once the next step has been planned belongs to that step.
        num_events = self.in_flight[0].num_events_before if self.in_flight else None
        events = self.scheduler.drain_events(num_events)
        for later in self.in_flight:
            later.num_events_before -= len(events)
        if self.tracer is not None:
            self._record(step, sampled, events)
        if self.check_invariants:
            self.scheduler.check_invariants()

    def _record(
        self, step: StepInFlight, sampled: dict[str, SampledToken], events: list[KVEvent]
    ) -> None:
        num_arrived = step.num_arrived
        arrived, self._arrived = self._arrived[:num_arrived], self._arrived[num_arrived:]
        for later in self.in_flight:
            later.num_arrived -= num_arrived
        ended, self._ended = self._ended, []
        number, times, plan = self.counts["steps"] - 1, step.times, step.plan
        assert self.tracer is not None
        settled = (number, self.milestone, times, plan, sampled, ended, events, arrived)
        self.tracer.record(SettledStep(*settled), self.scheduler)

    # -- interruptions -----------------------------------------------------------------------

    def _restart(self) -> None:
        """Begin anew with the requests as they are: their tokens are kept, their KV is not."""
        if self.peers is not None:
            self.peers.part()
        self.in_flight.clear()
        completions = [each for leader in self.requests.values() for each in leader.completions]
        self.scheduler.restart(completions)
        for leader in list(self.requests.values()):
            if leader.is_done:  # it took its last token in the step that was interrupted
                self.outbox.put(RequestOutput.from_request(leader), leader.reader)
                self._note_ends(leader)
        with contextlib.suppress(Exception):  # on a broken device the first error is the one
            self.runner.reset()
