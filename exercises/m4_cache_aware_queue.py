"""Admit first whose beginning is in the cache.

`fcfs` admits in the order of arrival. When requests with different system prompts take turns and
memory is short, each evicts the beginning that the next but one needs: the cache is full, and
nobody hits. Serve those together that share what is cached. Conditions:

1. Among waiting requests, the next is the one of which the cache saves most tokens
   (`prefix_cache.find(request).num_tokens`); of equals, the one that came first. What is cached
   changes with every step, so this is asked anew each time.
2. Nobody starves: a request that has been overtaken `patience` times, which is to say that so many
   later arrivals were popped while it waited, is next, whatever is cached. Of several such, the
   one that came first.
3. `peek` shows what the next `pop` gives.

The scheduler uses `add`, `peek`, `pop`, `remove`, `len` and iteration, as in
milestone_llm/engine/request_queue.py. To serve with it:

    engine.scheduler.waiting = CacheAwareQueue(engine.scheduler.prefix_cache)

    python -m pytest tests/exercises/test_m4_cache_aware_queue.py
"""

from __future__ import annotations

from m4_prefix_chunked.prefix_cache import PrefixCache
from milestone_llm.engine.request import Request
from milestone_llm.engine.request_queue import RequestQueue


class CacheAwareQueue(RequestQueue):
    """Waiting requests, those with most of their tokens in the cache first."""

    def __init__(self, prefix_cache: PrefixCache, patience: int = 8) -> None:
        super().__init__("fcfs")
        self.prefix_cache = prefix_cache
        self.patience = patience

    def peek(self) -> Request:
        """The next request, left in the queue. `self._requests` has all of them by their ids.

        Hint: `pop` takes from a list whose order you no longer want, so it needs replacing as well;
        there you know who is being overtaken.
        """
        raise NotImplementedError
