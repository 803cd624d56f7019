"""Steps that overlap: the GPU has work while Python plans.

    M1 to M4   | plan 0 | launch 0 | settle 0 | plan 1 | launch 1 | settle 1 | ...
    M5         | plan 0 | launch 0 | plan 1 | launch 1 | settle 0 | plan 2 | launch 2 | settle 1 ...

A step is planned before the tokens of the one before it are known. The plan needs to know how many
tokens a request has, and hardly ever which. Where it does, that step waits, see `can_run_ahead`.
"""

from __future__ import annotations

from collections.abc import Callable

from milestone_llm.core.engine_core import EngineCore
from milestone_llm.core.plan import StepPlan


class Pipeline:
    """The steps of a core, each settled after the next one has been launched.

    Args:
        can_run_ahead: whether a step can be launched before the tokens before it are known, and the
            next one before its own are.
    """

    def __init__(self, core: EngineCore, can_run_ahead: Callable[[StepPlan], bool]) -> None:
        self.core, self.can_run_ahead = core, can_run_ahead

    def step(self) -> None:
        """Plan and launch a step, settle those that are due.

        Raises:
            PlanError: as `EngineCore.step`.
        """
        core = self.core
        if not core.begin_step():
            return
        plan = core.scheduler.schedule()
        core.check(plan)
        # One step may stay in flight, unless this one has to know its tokens before it starts.
        num_ahead = 1 if not plan.is_empty and self.can_run_ahead(plan) else 0
        core.settle_until(num_ahead)
        if not plan.is_empty:
            core.launch(plan)
        core.settle_until(num_ahead)
        if not core.scheduler.has_unfinished_requests():
            core.settle_until(0)  # no request waits for what is in flight
