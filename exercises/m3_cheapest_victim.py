"""M3: when memory runs out, preempt the request that loses least.

m3_paged takes the blocks of the request that was admitted last. Under `preemption="recompute"` that
may be a request of hundreds of tokens, which all have to be computed again, while a request of ten
runs at the same time. Choose the victim by what its preemption costs. Two conditions:

1. Fewer tokens are computed twice than with the scheduler as it is.
2. A request that has been preempted `MAX_PREEMPTIONS` times is preempted again only if that is true
   of every running request. Otherwise the cheapest request would pay for all others, again and
   again. `request.num_preemptions` counts.

An order can promise condition 2, but no bound: if every running request has been preempted so often
and memory runs out, one of them has to go once more. (A bound needs more than an order: such a
request could be admitted only when there is memory for its full length.)

    python -m pytest tests/exercises/test_m3_cheapest_victim.py
"""

from __future__ import annotations

from m3_paged.scheduler import Scheduler
from milestone_llm.core.request import Request

MAX_PREEMPTIONS = 4


class CheapestVictimScheduler(Scheduler):
    """A paged scheduler that preempts the request that has least to lose."""

    def by_seniority(self) -> list[Request]:
        """Return running requests in the order in which a step serves them; the last is the victim.

        The order must not change within a step, except that victims leave it.

        Hint: `sorted` with a key of two parts: whether the request has been preempted often enough
        already, then what it would lose, `request.num_computed_tokens`.
        """
        raise NotImplementedError
