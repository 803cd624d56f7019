"""What HTTP wants of an engine and the engine has not taken yet. It is taken all at once.

An order that comes later takes the place of earlier ones where it can: a request that is aborted
before it was taken is gone, and who asks twice for figures asks once. So what an engine is owed is
never more than the requests that HTTP has let in, however long it stands still.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import dataclass, field

from milestone_llm.trace.records import StepRecord

from .client import EngineReport, EngineRequest, StepSink


@dataclass
class Orders:
    """Orders that go to the engine together, plain data. Aborts come before the requests."""

    aborts: dict[str, None] = field(default_factory=dict)
    """Ids of requests that were taken earlier, in order."""
    stops: dict[str, None] = field(default_factory=dict)
    """Ids of completions that a stop string has ended."""
    requests: dict[str, EngineRequest] = field(default_factory=dict)
    wants_report: bool = False
    watching: bool | None = None
    """Whether the records of steps are wanted from now on; None: as before."""
    is_last: bool = False
    """Whether the engine is to stop."""

    def extend(self, later: Orders) -> None:
        """Take later orders in."""
        for request_id in later.aborts:
            if self.requests.pop(request_id, None) is None:
                self.aborts[request_id] = None
        self.requests |= later.requests
        self.stops |= later.stops
        self.wants_report |= later.wants_report
        self.watching = self.watching if later.watching is None else later.watching
        self.is_last |= later.is_last


class OrderQueue:
    """Orders on their way from some threads to one. To put some in takes no time."""

    def __init__(self) -> None:
        self._orders = Orders()
        self._has_any = threading.Condition()

    def put(self, orders: Orders) -> None:
        """Add orders to those that wait."""
        with self._has_any:
            self._orders.extend(orders)
            self._has_any.notify()

    def take(self, waits: bool = True) -> Orders:
        """Everything that waits.

        Args:
            waits: until there is something; else what is given back may be empty.
        """
        with self._has_any:
            while waits and self._orders == Orders():
                self._has_any.wait()
            taken, self._orders = self._orders, Orders()
        return taken


class OrderingClient:
    """The calls of an `EngineClient` as orders, and whoever waits for what the engine says."""

    def __init__(self) -> None:
        self.orders = OrderQueue()
        self._sink: StepSink | None = None
        self._askers: list[Future[list[EngineReport]]] = []
        self._asking = threading.Lock()

    def add_requests(self, requests: list[EngineRequest]) -> None:
        """Queue requests. If the engine refuses one, it says so."""
        self.orders.put(Orders(requests={each.request_id: each for each in requests}))

    def abort(self, request_id: str) -> None:
        """End a request, wherever it is; before the next step it has no memory any more."""
        self.orders.put(Orders(aborts={request_id: None}))

    def end_completion(self, completion_id: str) -> None:
        """A stop string has ended a completion; others of its request go on."""
        self.orders.put(Orders(stops={completion_id: None}))

    def report(self) -> Future[list[EngineReport]]:
        """The figures as they are between two steps."""
        answer: Future[list[EngineReport]] = Future()
        with self._asking:  # whoever has given up is forgotten
            self._askers = [each for each in self._askers if not each.done()] + [answer]
        self.orders.put(Orders(wants_report=True))
        return answer

    def watch(self, sink: StepSink | None) -> None:
        """Give each step's record to `sink`, in the thread of `run`; None: no more."""
        self._sink = sink
        self.orders.put(Orders(watching=sink is not None))

    def stop(self) -> None:
        """Let `run` return after the step under way."""
        self.orders.put(Orders(is_last=True))

    # -- what the engine says ----------------------------------------------------------------

    def take_report(self, reports: list[EngineReport]) -> None:
        """Answer everybody who has asked for figures."""
        with self._asking:
            askers, self._askers = self._askers, []
        for answer in askers:
            if answer.set_running_or_notify_cancel():  # else it was given up
                answer.set_result(reports)

    def take_step(self, record: StepRecord) -> None:
        """Pass a step's record on to whoever watches."""
        if (sink := self._sink) is not None:
            sink(record)
