from __future__ import annotations

from milestone_llm.engine.request import Request
from milestone_llm.engine.request_queue import Key, RequestQueue


class FairQueue(RequestQueue):
    """Start-time fair queueing: a queue ordered by virtual start times."""

    def __init__(self, policy: str = "fcfs") -> None:
        super().__init__(policy)
        self._now = 0  # virtual start of the request popped last
        self._start: dict[str, int] = {}  # of each waiting request
        self._tenant_end: dict[str, int] = {}  # when a tenant's last request will be paid for

    def add(self, request: Request) -> None:
        tenant = request.request_id.partition("/")[0]
        start = max(self._now, self._tenant_end.get(tenant, 0))
        cost = request.num_prompt_tokens + request.sampling_params.max_tokens
        self._tenant_end[tenant] = start + cost
        self._start[request.request_id] = start
        super().add(request)

    def key(self, request: Request) -> Key:
        return (self._start[request.request_id], request.arrival, request.index)

    def pop(self) -> Request:
        request = super().pop()
        self._now = self._start.pop(request.request_id)
        return request
