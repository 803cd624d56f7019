"""The engine's core: plan, launch, settle. Written once, for all milestones.

    plan     scheduler.schedule()         who computes which tokens
    launch   runner.launch(plan)          the forward begins
    settle   launched.wait()              its tokens are there
             scheduler.update(...)        requests take them in, some finish

M1 to M4 do one after the other, as `EngineCore.step` does. M5 launches a step before it settles the
one before: it calls the same methods in another order (`m5_kernels/pipeline.py`).

Requests are token ids here, and so are outputs. Text, stop strings, threads, interruptions and
traces are the business of the driver that calls the core (`milestone_llm.frontend.engine_driver`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .outputs import EngineCoreOutput, SampledToken
from .plan import LaunchedStep, StepPlan
from .plan_rules import check_nobody_is_lost, check_plan
from .request import Request
from .scheduler import BaseScheduler


class ModelRunner(Protocol):
    """Carries plans out. Owns the KV tensors."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Start a step. It may still run when this returns."""

    def reset(self) -> None:
        """Forget all requests, after an exception: nothing of theirs may reach later requests."""


@dataclass
class StepInFlight:
    """A step that was launched and whose tokens have not been taken in."""

    plan: StepPlan
    launched: LaunchedStep


class StepListener:
    """Callbacks of a step. The methods here do nothing; a subclass overrides those that it needs,
    to count, time or record."""

    def added(self, requests: Sequence[Request]) -> None:
        """Called after the completions of a prompt have been queued."""

    def finished(self, request: Request) -> None:
        """Called after a request has been ended for a reason that is not in its tokens."""

    def planning(self) -> None:
        """Called before a step is planned."""

    def planned(self, plan: StepPlan) -> None:
        """Called after a step has been planned. An empty plan starts no step."""

    def launched(self, step: StepInFlight) -> None:
        """Called after a step has begun."""

    def computed(self, step: StepInFlight, sampled: dict[str, list[SampledToken]]) -> None:
        """Called when the tokens of the oldest step in flight are there."""

    def settled(self, step: StepInFlight) -> None:
        """Called after the requests of a step have taken their tokens in."""

    def restarted(self) -> None:
        """Called after the steps in flight have been dropped."""


class EngineCore:
    """A scheduler, a model runner, and the steps that they make together.

    Args:
        listener: gets the callbacks of each step.
    """

    def __init__(
        self,
        scheduler: BaseScheduler,
        runner: ModelRunner,
        listener: StepListener | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.listener = listener or StepListener()
        self.unfinished: dict[str, Request] = {}
        """Requests that were added and have not ended, by id: the scheduler may lose none."""
        self.in_flight: deque[StepInFlight] = deque()
        """Steps that were launched and are not settled, the oldest first."""
        self.computing: StepPlan | None = None
        """The plan that the runner is at work on: if the runner raises, this forward has failed."""
        self._outputs: list[EngineCoreOutput] = []
        """Outputs of settled steps that have not been taken, in the order of their rows."""
        self._num_queued = self._num_events = 0
        """How many requests waited or ran, and how many events of KV memory there were, before the
        newest plan."""

    # -- the step ----------------------------------------------------------------------------

    def step(self) -> None:
        """Plan a step, launch it, settle it; `take_outputs` returns its outputs.

        Raises:
            PlanError: the scheduler breaks a rule. Nothing of its plan has been computed.
        """
        if self.begin_step():
            plan = self.scheduler.schedule()  # plan: who computes how many tokens
            self.check(plan)
            self.launch(plan)  # launch: the forward pass begins
            self.settle()  # settle: its tokens are there, requests grow, some finish

    def begin_step(self) -> bool:
        """Return whether there is something to plan. If not, no request may be unfinished."""
        self._num_queued = self.scheduler.num_queued
        if not self._num_queued:
            check_nobody_is_lost(self.scheduler, 0, self.unfinished)
            return False
        self.listener.planning()  # which may take the events
        self._num_events = len(self.scheduler.kv.events)
        return True

    def check(self, plan: StepPlan) -> None:
        """Check the rules that all plans keep. A plan may be empty only while a step is in
        flight."""
        is_in_flight = bool(self.in_flight)
        before = self._num_queued, self._num_events
        check_plan(plan, self.scheduler, *before, self.unfinished, is_in_flight)
        self.listener.planned(plan)

    def launch(self, plan: StepPlan) -> None:
        """Start a step. From here on its tokens count as computed."""
        self.computing = plan
        launched = self.runner.launch(plan)
        self.computing = None
        self.scheduler.mark_launched(plan)
        step = StepInFlight(plan, launched)
        self.in_flight.append(step)
        self.listener.launched(step)

    def settle(self) -> None:
        """Wait for the oldest step in flight, and hand its tokens to the requests."""
        step = self.in_flight[0]
        self.computing = step.plan
        sampled = step.launched.wait()
        self.computing = None
        self.listener.computed(step, sampled)
        outputs = self.scheduler.update(step.plan, sampled)
        for output in outputs:
            if output.finish_reason is not None:
                self.unfinished.pop(output.request_id, None)
        self._outputs += outputs
        self.in_flight.popleft()
        self.listener.settled(step)

    def settle_until(self, num_ahead: int) -> None:
        """Settle all but the newest `num_ahead` steps in flight."""
        while len(self.in_flight) > num_ahead:
            self.settle()

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Return the outputs of the steps settled since the last call."""
        taken, self._outputs = self._outputs, []
        return taken

    # -- requests come and go ----------------------------------------------------------------

    def add_request(self, *requests: Request) -> None:
        """Queue a request, or several that come together; the next steps compute them."""
        self.unfinished.update({each.request_id: each for each in requests})
        self.scheduler.add(*requests)
        self.listener.added(requests)

    def finish_request(self, request: Request, reason: str) -> None:
        """End a request, in any state, for a reason that is not in its tokens."""
        self.scheduler.finish(request, reason)
        self.unfinished.pop(request.request_id, None)
        self.listener.finished(request)
        if not self.scheduler.has_unfinished_requests():
            self.settle_until(0)  # no request waits for what is in flight

    def restart(self, requests: Iterable[Request]) -> None:
        """Begin anew with these requests, after an exception anywhere. The requests keep their
        tokens, KV memory is given back, and steps in flight are dropped."""
        self.computing = None
        self.in_flight.clear()
        self._outputs = []
        self.listener.restarted()
        requests = list(requests)
        self.scheduler.restart(requests)
        self.unfinished = {each.request_id: each for each in requests if not each.is_finished}
        with contextlib.suppress(Exception):  # on a broken device the first error is the cause
            self.runner.reset()
