"""Makes an engine's core and drives it: exclusion, failures, restarts.

    BaseEngine.step, EngineLoop.run
      EngineDriver.run          one thread at a time; after an exception, requests lose nothing
        EngineCore.step         plan, launch, settle
          Scheduler.schedule    who computes which tokens

The driver makes the core, and several may use it: `generate`, HTTP and the playground take the
outputs of their own requests, each with a sink. A change of the engine happens completely or not at
all. A step whose forward raises ends its requests with `error`. After any other exception, Ctrl-C
included, all requests go on: they keep their tokens; KV memory is given back, and its content
computed again.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, Protocol, TypeVar

from milestone_llm.core.engine_core import EngineCore, ModelRunner
from milestone_llm.core.errors import InputError
from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.scheduler import BaseScheduler

from .step_log import StepLog

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class OutputSink(Protocol):
    """Takes the core's outputs, to make text of them or to send them to another process."""

    def process(self, outputs: Sequence[EngineCoreOutput]) -> dict[str, str]:
        """Take outputs in, in their order. Ignore outputs of completions that another sink has, and
        outputs without tokens and without a finish reason.

        Returns:
            The finish reason by id, of completions that these outputs have ended, or that ended
            earlier. The core may not know of the end, where a stop string is in the text.
        """

    def repair(self) -> dict[str, int]:
        """Repair the states of completions after an interruption anywhere.

        Returns:
            How many output tokens of each completion have been taken in, by id. A completion that
            is in no sink is not wanted any more.
        """


class Peers:
    """The same engine in other processes, which plans the same steps (tensor parallelism).

    This class has no peers, and its methods do nothing; a subclass tells the peers.
    """

    def before(self, call: str, core: EngineCore) -> None:
        """Take in what came to another engine. Called before each call that all engines make."""

    def in_step(self, core: EngineCore, step: Callable[[], None]) -> Callable[[], None]:
        """Return a step that all engines make together."""
        return step

    def added(self, requests: Sequence[Request]) -> None:
        """Called after the completions of a prompt have been queued here."""

    def finished(self, request: Request, reason: str) -> None:
        """Called after a completion has been ended here."""

    def parted(self) -> None:
        """Called before this engine restarts: it then no longer knows what the others know."""


class StepMaker(Protocol):
    """Makes the steps of a core: the core itself, or a pipeline in which steps overlap."""

    def step(self) -> None:
        """Make the next step."""


class EngineDriver:
    """Makes a core and changes it: one thread at a time, and wholly or not at all.

    Every change goes through `run`; changes are made of `step`, `add` and `finish`. (A driver
    refers to its parts, and no part refers to the driver. So an engine that is thrown away is gone
    at once, and its memory with it.)

    Args:
        scheduler: plans the steps.
        runner: carries the plans out.
        log: the core's listener.
        pipeline: makes the core's steps in another way than `EngineCore.step`.
        peers: the same engine in other processes, if there are any.
    """

    def __init__(
        self,
        scheduler: BaseScheduler,
        runner: ModelRunner,
        log: StepLog,
        *,
        pipeline: Callable[[EngineCore], StepMaker] | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.core = core = EngineCore(scheduler, runner, log)
        self.log = log
        self.peers = peers or Peers()
        steps = core if pipeline is None else pipeline(core)
        self.step = self.peers.in_step(core, steps.step)
        """The change that computes a step."""
        self.requests: dict[str, Request] = {}
        """Completions that no sink has reported as finished, by id."""
        self._sinks: list[OutputSink] = []
        self._process, self._lock = os.getpid(), threading.RLock()
        self._owner: int | None = None
        """The thread that is changing the engine."""
        self._is_torn = False
        """True during a change, and after an interruption until the restart is complete."""

    def attach(self, sink: OutputSink) -> None:
        """Let a sink take the outputs of the completions that it knows."""
        self._sinks.append(sink)

    # -- changes -----------------------------------------------------------------------------

    def run(
        self,
        change: Callable[Arguments, Result],
        *args: Arguments.args,
        **fields: Arguments.kwargs,
    ) -> Result:
        """Make a change: compute a step, add requests, end some, forget cached prefixes. Then hand
        the core's outputs to the sinks.

        Raises:
            Exception: the model's forward raised. The step's requests have ended then.
            InputError: the change refused its input, before it changed anything.
            RuntimeError: called from within a change, by a watcher of the steps for instance.
        """
        if self._process != os.getpid():  # forked: the thread that had the lock is not here
            self._process, self._lock, self._owner = os.getpid(), threading.RLock(), None
        if self.is_inside():
            raise RuntimeError("the engine was called from within one of its own steps")
        # The change before may have ended without releasing the lock yet: it will do so itself.
        is_held = self._lock._is_owned()  # type: ignore[attr-defined]
        try:
            with self._lock:
                return self._change(change, *args, **fields)
        finally:
            if self.is_inside():
                self._owner = None
            if not is_held:
                self._release()

    def is_inside(self) -> bool:
        """Whether this thread is within a change already."""
        return self._owner == threading.get_ident()

    # -- what changes are made of ------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the completions of a prompt. The caller then tells a sink of them: a restart drops
        completions that no sink knows."""
        self.requests.update({each.request_id: each for each in requests})
        self.core.add_request(*requests)
        self.peers.added(requests)

    def finish(self, completion_ids: Iterable[str], reason: str) -> None:
        """End completions, except those that have ended already."""
        outputs = []
        for completion_id in completion_ids:
            request = self.requests.get(completion_id)
            if request is not None and not request.is_finished:
                self._finish(request, reason)
                outputs.append(request.output_since(request.num_output_tokens))
        self._hand_over(outputs)

    def agree(self, call: str) -> None:
        """Let the peers make the same call."""
        self.peers.before(call, self.core)

    def _hand_over(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for sink in self._sinks:
            for completion_id, reason in sink.process(outputs).items():
                request = self.requests.get(completion_id)
                if request is None:
                    continue
                if not request.is_finished:  # the core does not know of stop strings
                    self._finish(request, reason)
                self.log.ended(completion_id, reason)
                del self.requests[completion_id]

    def _finish(self, request: Request, reason: str) -> None:
        try:
            self.core.finish_request(request, reason)
        except Exception:
            if self.core.scheduler.has_unfinished_requests():
                raise
            self._begin_anew(())  # the step in flight raised; its requests have all ended
        self.peers.finished(request, reason)

    # -- one thread at a time ----------------------------------------------------------------

    def _change(
        self,
        change: Callable[Arguments, Result],
        *args: Arguments.args,
        **fields: Arguments.kwargs,
    ) -> Result:
        # A function of its own: Python 3.11 leaves a `try:` right behind `with` outside of both,
        # and an exception in that moment would leave the lock held.
        try:
            self._begin()
            result = change(*args, **fields)
            self._hand_over(self.core.take_outputs())
            self.log.close_steps()
            self._end()
        except BaseException as error:
            if isinstance(error, InputError) and change is not self.step:
                self._end()  # the input is refused, and nothing has changed
            else:
                self._restart_after(error)
            raise
        return result

    def _begin(self) -> None:
        self._owner = threading.get_ident()
        if self._is_torn:  # a change was interrupted, and so was the restart
            self._restart()
        self._is_torn = True

    def _end(self) -> None:
        self._is_torn = False
        self._owner = None

    def _release(self) -> None:
        """Release the lock. `with` would leave it held after Ctrl-C in the very moment in which
        `with` begins or ends."""
        with contextlib.suppress(RuntimeError):  # already free, as it should be, or another's
            self._lock.release()

    # -- failures and interruptions ----------------------------------------------------------

    def _restart_after(self, error: BaseException) -> None:
        # Still inside a change: a stream that is thrown away meanwhile must not make its own.
        self._owner = threading.get_ident()
        try:
            if isinstance(error, Exception) and self.core.computing is not None:
                self._fail(self.core.computing)
            self._restart()
            self._is_torn = False
        except Exception as second:  # most likely a consequence of the first
            raise error from second
        finally:
            self._owner = None

    def _fail(self, plan: StepPlan) -> None:
        """End the requests of the step whose forward raised."""
        self.core.computing = None
        if all(step.plan is not plan for step in self.core.in_flight):
            # The failed step was being launched. The step before is good, or fails as well.
            with contextlib.suppress(Exception):
                self.core.settle_until(0)
            if self.core.computing is not None:
                self._fail(self.core.computing)
        self.core.scheduler.fail(plan)
        self.log.failed(plan)

    def _restart(self) -> None:
        """Restart with the requests as they are, and hand over the tokens that the sinks lack."""
        num_taken: dict[str, int] = {}
        for sink in self._sinks:
            num_taken |= sink.repair()
        self.requests = {name: self.requests[name] for name in self.requests if name in num_taken}
        self._begin_anew(self.requests.values())
        self._hand_over(
            [each.output_since(num_taken[name]) for name, each in self.requests.items()]
        )
        self.log.close_steps()

    def _begin_anew(self, requests: Iterable[Request]) -> None:
        self.peers.parted()
        self.core.restart(requests)
