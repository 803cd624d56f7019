"""The waiting requests, in the order in which they are served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from operator import itemgetter

from .request import Request

Key = tuple[float, int, int]


class RequestQueue:
    """Waiting requests by arrival (`fcfs`) or by (priority, arrival) (`priority`).

    One sorted list serves both policies, and puts a preempted request (from m3_paged on) where it
    belongs: under `fcfs` at the head. Places are found by bisection, so few requests are looked at.
    """

    def __init__(self, policy: str = "fcfs") -> None:
        self.policy = policy
        self._entries: list[tuple[Key, Request]] = []
        self._requests: dict[str, Request] = {}

    def key(self, request: Request) -> Key:
        """Return the sort key of a request: lower is sooner; unique among unfinished requests.

        A scheduler that wants another order replaces it: `self.waiting.key = ...`.
        """
        priority = request.priority if self.policy == "priority" else 0
        return (priority, request.arrival, request.index)

    def add(self, request: Request) -> None:
        """Put a request where its key belongs."""
        self._requests[request.request_id] = request
        bisect.insort(self._entries, (self.key(request), request), key=itemgetter(0))

    def peek(self) -> Request:
        """Return the next request, and leave it in the queue."""
        return self._entries[0][1]

    def pop(self) -> Request:
        """Take the next request out, and return it."""
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out of the queue, from any place."""
        del self._requests[request.request_id]
        del self._entries[bisect.bisect_left(self._entries, self.key(request), key=itemgetter(0))]

    def clear(self) -> None:
        """Take all requests out, even if the queue is broken."""
        self._entries, self._requests = [], {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """Yield all requests in the order in which they would be popped."""
        return iter([request for _, request in self._entries])

    def __repr__(self) -> str:
        return f"<RequestQueue {[each.request_id for each in self]}>"
