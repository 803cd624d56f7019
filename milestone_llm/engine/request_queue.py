"""The waiting requests, in the order in which they are served."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from .request import Request


class RequestQueue:
    """Waiting requests by arrival (`fcfs`) or by (priority, arrival) (`priority`).

    One heap serves both. It also puts a preempted request (from m3_paged on) where it belongs: it
    arrived before everyone who still waits, so under `fcfs` it is at the head again.
    `add`, `pop` and `remove` take O(log n); a removed entry stays in the heap until it surfaces.
    """

    def __init__(self, policy: str = "fcfs") -> None:
        self.policy = policy
        self._heap: list[tuple[tuple[int, int], str]] = []
        self._requests: dict[str, Request] = {}

    def key(self, request: Request) -> tuple[int, int]:
        """What the queue is ordered by; unique per request, lower is sooner."""
        return (request.priority if self.policy == "priority" else 0, request.arrival)

    def add(self, request: Request) -> None:
        """Put a request where its key belongs."""
        self._requests[request.request_id] = request
        heapq.heappush(self._heap, (self.key(request), request.request_id))

    def peek(self) -> Request:
        """The next request, left in the queue."""
        self._drop_removed()
        return self._requests[self._heap[0][1]]

    def pop(self) -> Request:
        """Take the next request out."""
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take a request out wherever it is."""
        del self._requests[request.request_id]

    def _drop_removed(self) -> None:
        while not self._is_current(self._heap[0]):
            heapq.heappop(self._heap)

    def _is_current(self, entry: tuple[tuple[int, int], str]) -> bool:
        """An id may be used again after its first bearer was removed: compare the keys as well."""
        request = self._requests.get(entry[1])
        return request is not None and self.key(request) == entry[0]

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        """All requests in the order in which they would be popped."""
        return iter(sorted(self._requests.values(), key=self.key))
