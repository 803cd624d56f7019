from __future__ import annotations

from m4_prefix_chunked.prefix_cache import PrefixCache
from milestone_llm.core.request import Request
from milestone_llm.core.request_queue import Key, RequestQueue


class CacheAwareQueue(RequestQueue):
    """Longest cached prefix first, until somebody has been overtaken too often."""

    def __init__(self, prefix_cache: PrefixCache, patience: int = 8) -> None:
        super().__init__("fcfs")
        self.prefix_cache = prefix_cache
        self.patience = patience
        self._overtaken: dict[str, int] = {}

    def add(self, request: Request) -> None:
        self._overtaken.setdefault(request.request_id, 0)
        super().add(request)

    def peek(self) -> Request:
        requests = self._requests.values()
        impatient = [r for r in requests if self._overtaken[r.request_id] >= self.patience]
        if impatient:
            return min(impatient, key=self.key)

        def key(request: Request) -> tuple[int, Key]:
            return (-self.prefix_cache.find(request).num_tokens, self.key(request))

        return min(requests, key=key)

    def pop(self) -> Request:
        request = self.peek()
        self.remove(request)
        for other in self._requests.values():
            self._overtaken[other.request_id] += other.arrival < request.arrival
        return request

    def remove(self, request: Request) -> None:
        super().remove(request)
        del self._overtaken[request.request_id]
