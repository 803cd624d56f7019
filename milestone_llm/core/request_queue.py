"""The waiting requests, in the order in which they are served."""

from __future__ import annotations

import bisect
from collections.abc import Iterator

from .request import Request

Key = tuple[float, int, int]


class RequestQueue:
    """Waiting requests by arrival (`fcfs`) or by (priority, arrival) (`priority`).

    One sorted list serves both, and puts a preempted request (from m3_paged on) where it belongs:
    under `fcfs` at the head. A new request mostly goes to the end, the next to serve is at the
    head: both are O(1). A removed entry stays until it comes to the head, or most entries are such.
    """

    def __init__(self, policy: str = "fcfs") -> None:
        self.policy = policy
        self._entries: list[tuple[Key, Request]] = []
        self._head = 0  # entries before it have been popped
        self._requests: dict[str, Request] = {}

    def key(self, request: Request) -> Key:
        """What the queue is ordered by, lower is sooner; unique among unfinished requests."""
        priority = request.priority if self.policy == "priority" else 0
        return (priority, request.arrival, request.index)

    def add(self, request: Request) -> None:
        """Put a request where its key belongs."""
        self._requests[request.request_id] = request
        entry = (self.key(request), request)
        bisect.insort(self._entries, entry, lo=self._head, key=lambda entry: entry[0])

    def peek(self) -> Request:
        """The next request, left in the queue."""
        while not self._is_current(self._entries[self._head]):
            self._head += 1
        return self._entries[self._head][1]

    def pop(self) -> Request:
        """Take the next request out."""
        request = self.peek()
        self.remove(request)
        return request

    def remove(self, request: Request) -> None:
        """Take a request out wherever it is."""
        del self._requests[request.request_id]
        self._compact()

    def clear(self) -> None:
        """Take everybody out, in whatever state the queue is."""
        self._entries, self._head, self._requests = [], 0, {}

    def _compact(self) -> None:
        if len(self._entries) > 2 * len(self._requests) + 64:
            self._entries = [e for e in self._entries[self._head :] if self._is_current(e)]
            self._head = 0

    def _is_current(self, entry: tuple[Key, Request]) -> bool:
        """Whether the entry's request waits. It may be here twice: removed, then added again."""
        key, request = entry
        return request in self and key == self.key(request)

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return self._requests.get(request.request_id) is request

    def __iter__(self) -> Iterator[Request]:
        """All requests in the order in which they would be popped."""
        current = filter(self._is_current, self._entries[self._head :])
        return iter({request.request_id: request for _, request in current}.values())

    def __repr__(self) -> str:
        return f"<RequestQueue {[each.request_id for each in self]}>"
