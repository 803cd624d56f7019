"""A queue in which tenants take turns, whoever of them shouts most.

Under `fcfs` a tenant that queues a thousand requests makes everybody else wait for all of them.
A fair queue serves tenants alternately, by the work that they cause:

- the tenant of request "alice/17" is "alice";
- a request costs its prompt's tokens plus its `max_tokens`, and is paid for when it is popped;
- among tenants that have something waiting, the next to be served is who has paid least;
- requests of one tenant are served in the order of their arrival;
- a tenant that was away gains no credit by it: on its return it stands level with the others
  instead of having all turns until it has caught up ("Fairness in Serving Large Language Models",
  OSDI '24, calls its version of this the lift of the counter).

The scheduler uses `add`, `peek`, `pop`, `remove`, `len` and iteration, as in
milestone_llm/engine/request_queue.py: `peek` shows what the next `pop` gives, iteration goes in the
order in which requests would be popped if no more came. To serve with it:

    engine.scheduler.waiting = FairQueue()

    python -m pytest tests/exercises/test_m2_fair_queue.py
"""

from __future__ import annotations

from milestone_llm.engine.request import Request
from milestone_llm.engine.request_queue import RequestQueue


class FairQueue(RequestQueue):
    """Waiting requests, in an order that is fair to tenants."""

    def add(self, request: Request) -> None:
        """Put a request where it belongs.

        Hint: give it a virtual start time when it is added - when its tenant will have paid for
        what it queued before, but not before now - and the list of `RequestQueue`, sorted by
        `key`, does the rest.
        """
        raise NotImplementedError
