"""M2: a queue in which tenants take turns, also if one of them sends many requests.

Under `fcfs`, when a tenant queues a thousand requests, all other tenants wait for all of them. A
fair queue serves tenants in turn, by the work that they cause:

- The tenant of request "alice/17" is "alice".
- A request costs its prompt's tokens plus its `max_tokens`. Its tenant pays when it is popped, and
  not before: a request that is aborted while it waits costs nothing.
- Of the tenants with waiting requests, the next is the one that has paid least. Of equals, the one
  whose oldest request came first.
- Requests of one tenant are served in the order of their arrival.
- A tenant that was away gains no credit by it, and keeps what it has paid. When it comes back, it
  counts as having paid at least what the tenant served last had paid before that turn. Otherwise
  it would have all turns until it has caught up.
  ("Fairness in Serving Large Language Models", OSDI '24, calls this the lift of the counter.)

The scheduler uses `add`, `peek`, `pop`, `remove`, `len` and iteration, as in
milestone_llm/core/request_queue.py. `peek` shows what the next `pop` gives. Iteration goes in the
order in which requests would be popped if no more came. To serve with it:

    engine.scheduler.waiting = FairQueue()

    python -m pytest tests/exercises/test_m2_fair_queue.py
"""

from __future__ import annotations

from milestone_llm.core.request import Request
from milestone_llm.core.request_queue import RequestQueue


class FairQueue(RequestQueue):
    """Waiting requests, in an order that is fair to tenants."""

    def add(self, request: Request) -> None:
        """Add a request. Lift its tenant's counter if the tenant had no waiting request.

        Hint: keep one number a tenant, what it has paid. `super().__iter__()` gives the waiting
        requests in the order of arrival. Write an `__iter__` that serves them on a copy of the
        numbers. Then `peek` is the first of `__iter__`, and `pop` is that request, removed, with
        its price added to the number of its tenant. `remove` can stay as it is.
        """
        raise NotImplementedError
