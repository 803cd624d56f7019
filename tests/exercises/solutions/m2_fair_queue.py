from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from milestone_llm.core.request import Request
from milestone_llm.core.request_queue import RequestQueue


class FairQueue(RequestQueue):
    """The tenant that has paid least is next; who comes back is lifted to the others' level."""

    def __init__(self, policy: str = "fcfs") -> None:
        super().__init__(policy)
        self._paid: dict[str, int] = {}
        self._level = 0
        """What the tenant served last had paid before it was served."""

    def add(self, request: Request) -> None:
        tenant = tenant_of(request)
        if tenant not in {tenant_of(other) for other in super().__iter__()}:
            self._paid[tenant] = max(self._paid.get(tenant, 0), self._level)
        super().add(request)

    def __iter__(self) -> Iterator[Request]:
        paid, waiting = dict(self._paid), dict[str, deque[Request]]()
        for request in super().__iter__():
            waiting.setdefault(tenant_of(request), deque()).append(request)
        while waiting:
            tenant = min(waiting, key=lambda name: (paid[name], waiting[name][0].arrival))
            request = waiting[tenant].popleft()
            paid[tenant] += price_of(request)
            if not waiting[tenant]:
                del waiting[tenant]
            yield request

    def peek(self) -> Request:
        return next(iter(self))

    def pop(self) -> Request:
        request = self.peek()
        self.remove(request)
        self._level = self._paid[tenant_of(request)]
        self._paid[tenant_of(request)] += price_of(request)
        return request


def tenant_of(request: Request) -> str:
    return request.request_id.partition("/")[0]


def price_of(request: Request) -> int:
    return request.num_prompt_tokens + request.sampling_params.max_tokens
