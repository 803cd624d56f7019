"""What carries a core, for `generate` and `step` as for a server: exclusion, failures, restarts.

    BaseEngine.step, EngineLoop.run
      EngineDriver.step         one thread at a time; whatever is raised, requests lose nothing
        EngineCore.step         plan, launch, settle
          Scheduler.schedule    who computes which tokens

A change of the engine has happened or it has not. A step whose forward raises ends its requests
with `error`. After whatever else is raised, Ctrl-C included, all requests go on: they keep their
tokens, KV memory is given back and computed again.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import ParamSpec, Protocol, TypeVar

from milestone_llm.core.engine_core import EngineCore
from milestone_llm.core.errors import InputError
from milestone_llm.core.outputs import EngineCoreOutput
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request

from .step_log import StepLog

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class OutputSink(Protocol):
    """Takes what the core has brought: text is made of it, or it is sent to another process."""

    def process(self, outputs: Sequence[EngineCoreOutput]) -> dict[str, str]:
        """Take outputs in, in their order. One that has neither tokens nor a reason is no news.

        Returns:
            Why completions have ended, by id: those that these outputs have ended, or that ended
            earlier. The core need not know of it, where a stop string is in the text.
        """

    def repair(self) -> dict[str, int]:
        """After an interruption anywhere: make whole what was left half done.

        Returns:
            How many output tokens of each completion have been taken in, by id. A completion that
            is not there is not wanted any more.
        """


class Peers:
    """The same engine in other processes, which plans the same steps (tensor parallelism).

    This one has none; a subclass tells them.
    """

    def before(self, call: str, core: EngineCore) -> None:
        """Before a call that all make: what came to another engine comes to this core now."""

    def added(self, requests: Sequence[Request]) -> None:
        """The completions of a prompt have been queued here."""

    def finished(self, request: Request, reason: str) -> None:
        """A completion has been ended here."""

    def parted(self) -> None:
        """This engine begins anew, and no longer knows what the others know."""


class EngineDriver:
    """Changes a core: one thread at a time, and wholly or not at all.

    `step` is a change. Others go through `run`; `add` and `finish` are what they are made of. (A
    driver refers to what it is given and nothing refers to it, so that an engine that is thrown
    away is gone at once, and its memory with it.)

    Args:
        log: what listens to the core.
        sink: who takes the outputs.
    """

    def __init__(
        self, core: EngineCore, log: StepLog, sink: OutputSink, peers: Peers | None = None
    ) -> None:
        self.core = core
        self.log = log
        self.peers = peers or Peers()
        self.requests: dict[str, Request] = {}
        """Completions of whose end the sink has not said anything, by id."""
        self._sink = sink
        self._lock = threading.RLock()
        self._owner: int | None = None
        """The thread that is changing the engine."""
        self._is_torn = False
        """True during a change, and after an interruption until the restart is complete."""

    # -- changes -----------------------------------------------------------------------------

    def step(self) -> None:
        """Compute one step, and hand over what it has brought.

        Raises:
            Exception: what the model's forward raised. The step's requests have ended then.
            RuntimeError: called from within a change, by something that watches the steps, say.
        """
        self._check_outside()
        try:
            with self._lock:
                try:
                    self._begin()
                    self.peers.before("step", self.core)
                    self._hand_over(self.core.step())
                    self.log.close_steps()
                    self._end()
                except BaseException as error:
                    self._restart_after(error)
                    raise
        finally:
            self._release()

    def run(
        self,
        change: Callable[Arguments, Result],
        *args: Arguments.args,
        **fields: Arguments.kwargs,
    ) -> Result:
        """Make another change: add requests, end some, forget cached prefixes.

        Raises:
            InputError: the change refused what it was given, before it changed anything.
            RuntimeError: as `step`.
        """
        self._check_outside()
        try:
            with self._lock:
                try:
                    self._begin()
                    result = change(*args, **fields)
                    self._end()
                except InputError:
                    self._end()
                    raise
                except BaseException as error:
                    self._restart_after(error)
                    raise
                return result
        finally:
            self._release()

    def is_inside(self) -> bool:
        """Whether this thread is within a change already."""
        return self._owner == threading.get_ident()

    # -- what changes are made of ------------------------------------------------------------

    def add(self, requests: Sequence[Request]) -> None:
        """Queue the completions of a prompt. The sink has to know them next, or they are dropped
        where this is interrupted."""
        self.requests.update({each.request_id: each for each in requests})
        self.core.add_request(*requests)
        self.peers.added(requests)

    def finish(self, completion_ids: Iterable[str], reason: str) -> None:
        """End those of some completions that have not ended."""
        outputs = []
        for completion_id in completion_ids:
            request = self.requests.get(completion_id)
            if request is not None and not request.is_finished:
                self._finish(request, reason)
                outputs.append(request.output_since(request.num_output_tokens))
        self._hand_over(outputs)
        self.log.close_steps()  # the step in flight may have been settled

    def agree(self, call: str) -> None:
        """Let the peers make the same call."""
        self.peers.before(call, self.core)

    def _hand_over(self, outputs: Sequence[EngineCoreOutput]) -> None:
        for completion_id, reason in self._sink.process(outputs).items():
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
            self._begin_anew(())  # it was raised by the step in flight, whose requests have ended
        self.peers.finished(request, reason)

    # -- one thread at a time ----------------------------------------------------------------

    def _check_outside(self) -> None:
        if self.is_inside():
            raise RuntimeError("the engine was called from within one of its own steps")

    def _begin(self) -> None:
        self._owner = threading.get_ident()
        if self._is_torn:  # a change was interrupted, and so was the restart
            self._restart()
        self._is_torn = True

    def _end(self) -> None:
        self._is_torn = False
        self._owner = None

    def _release(self) -> None:
        """Ctrl-C in the very moment in which `with` begins or ends would leave the lock held."""
        if self.is_inside():
            self._owner = None
        with contextlib.suppress(RuntimeError):  # it is free, as it should be, or another thread's
            self._lock.release()

    # -- failures and interruptions ----------------------------------------------------------

    def _restart_after(self, error: BaseException) -> None:
        self._owner = None
        try:
            if isinstance(error, Exception) and self.core.computing is not None:
                self._fail(self.core.computing)
            self._restart()
        except Exception as second:  # of what the first one left, most likely
            raise error from second
        self._is_torn = False

    def _fail(self, plan: StepPlan) -> None:
        """End the requests of the step whose forward raised."""
        self.core.computing = None
        if all(step.plan is not plan for step in self.core.in_flight):
            # It was being launched. The step before is as good as ever, or fails as well.
            with contextlib.suppress(Exception):
                self.core.settle_until(0)
            if self.core.computing is not None:
                self._fail(self.core.computing)
        self.core.scheduler.fail(plan)
        self.log.failed(plan)

    def _restart(self) -> None:
        """Go on with the requests as they are: what the sink lacks of them is handed over."""
        num_taken = self._sink.repair()
        self.requests = {name: self.requests[name] for name in self.requests if name in num_taken}
        self._begin_anew(self.requests.values())
        self._hand_over(
            [each.output_since(num_taken[name]) for name, each in self.requests.items()]
        )
        self.log.close_steps()

    def _begin_anew(self, requests: Iterable[Request]) -> None:
        self.peers.parted()
        self.core.restart(requests)
