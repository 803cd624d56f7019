"""What M2 adds to the configuration: in which order requests are served."""

from __future__ import annotations

import math
from dataclasses import dataclass

from milestone_llm.core.errors import InputError
from milestone_llm.frontend import config as base


@dataclass(frozen=True)
class EngineConfig(base.EngineConfig):
    """Limits and switches of a continuously batching engine."""

    policy: str = "fcfs"
    """"fcfs": first come, first served. "priority": by (priority, arrival), lower is sooner."""
    aging_seconds: float | None = None
    """With "priority": whoever waits so long counts as more urgent by 1, and so on, so that nobody
    starves. None: nobody ages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_order(self.policy, self.aging_seconds)
        check_step_budget(self.max_num_batched_tokens, self.max_num_seqs)


def check_order(policy: str, aging_seconds: float | None) -> None:
    """The order in which requests are served.

    Raises:
        InputError: there is none such.
    """
    if policy not in ("fcfs", "priority"):
        raise InputError(f'policy must be "fcfs" or "priority", got {policy!r}')
    if aging_seconds is not None:
        if not 0 < aging_seconds < math.inf:
            raise InputError(f"aging_seconds must be above 0, got {aging_seconds}")
        if policy != "priority":
            raise InputError('aging_seconds is for policy="priority": under "fcfs" nobody ages')


def check_step_budget(max_num_batched_tokens: int, max_num_seqs: int) -> None:
    """A step must have room for one token of every running request.

    Raises:
        InputError: it has not.
    """
    if max_num_batched_tokens < max_num_seqs:
        raise InputError(
            f"max_num_batched_tokens={max_num_batched_tokens} is less than "
            f"max_num_seqs={max_num_seqs}: a step could not decode all running requests"
        )
