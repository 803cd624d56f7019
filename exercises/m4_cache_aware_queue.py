"""M4: admit first the request whose beginning is in the cache.

`fcfs` admits in the order of arrival. When requests with two system prompts alternate and memory is
short, each request evicts the prompt that the next one needs: the cache is full and of little use.
Serve requests together that share cached blocks. Conditions:

1. The next request is the waiting one for which the cache saves most tokens
   (`prefix_cache.find(request).num_tokens`); of equals, the one that came first. The cache changes
   with every step, so ask again each time.
2. No request starves. A request is overtaken when a request that arrived later is popped while it
   waits. A request that has been overtaken `patience` times is next, with any cache. Of several
   such requests, the one that came first.
3. `peek` shows what the next `pop` gives.

The scheduler uses `add`, `peek`, `pop`, `remove`, `len` and iteration, as in
milestone_llm/core/request_queue.py. To serve with it:

    engine.scheduler.waiting = CacheAwareQueue(engine.scheduler.kv.prefix_cache)

    python -m pytest tests/exercises/test_m4_cache_aware_queue.py
"""

from __future__ import annotations

from m4_prefix_chunked.prefix_cache import PrefixCache
from milestone_llm.core.request import Request
from milestone_llm.core.request_queue import RequestQueue


class CacheAwareQueue(RequestQueue):
    """Waiting requests, those with most of their tokens in the cache first."""

    def __init__(self, prefix_cache: PrefixCache, patience: int = 8) -> None:
        super().__init__("fcfs")
        self.prefix_cache = prefix_cache
        self.patience = patience

    def peek(self) -> Request:
        """Return the next request, but leave it in the queue. `self._requests` has all of them by
        id.

        Hint: the `pop` of `RequestQueue` takes from a list in the order of arrival, so write `pop`
        as well: it is `peek` and `remove`, and there you know who is overtaken.
        """
        raise NotImplementedError
