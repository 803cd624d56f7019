from __future__ import annotations

from m3_paged.scheduler import Scheduler
from milestone_llm.core.request import Request

MAX_PREEMPTIONS = 4


class CheapestVictimScheduler(Scheduler):
    def by_seniority(self) -> list[Request]:
        def key(request: Request) -> tuple[bool, int]:
            has_paid_enough = request.num_preemptions >= MAX_PREEMPTIONS
            return (not has_paid_enough, -request.num_computed_tokens)

        return sorted(self.running, key=key)
