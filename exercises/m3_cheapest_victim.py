"""When memory runs out, preempt the request that loses least.

m3_paged takes the blocks of whoever was admitted last. Under `preemption="recompute"` that may
be a request of hundreds of tokens, all of which have to be computed again, while beside it runs
one of ten. Choose the victim by what its preemption costs. Two conditions:

1. Fewer tokens are computed twice than with the scheduler as it is.
2. No request is preempted more than `MAX_PREEMPTIONS` times, or the cheapest one would pay for all
   others again and again. `request.metrics.num_preemptions` counts.

    python -m pytest tests/exercises/test_m3_cheapest_victim.py
"""

from __future__ import annotations

from m3_paged.scheduler import Scheduler
from milestone_llm.engine.request import Request

MAX_PREEMPTIONS = 4


class CheapestVictimScheduler(Scheduler):
    """A paged scheduler that preempts who has least to lose."""

    def by_seniority(self) -> list[Request]:
        """Running requests in the order in which a step serves them; the last is the victim.

        The order must not change within a step, except that victims drop out of it.
        """
        raise NotImplementedError
