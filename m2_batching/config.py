"""M2's additions to the configuration: in which order requests are served."""

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
    """Under "priority", a request becomes more urgent by 1 each time it has waited this long, so
    that none starves. None: waiting does not count."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in ("fcfs", "priority"):
            raise InputError(f'policy must be "fcfs" or "priority", got {self.policy!r}')
        if self.aging_seconds is not None:
            if not 0 < self.aging_seconds < math.inf:
                raise InputError(f"aging_seconds must be above 0, got {self.aging_seconds}")
            if self.policy != "priority":
                raise InputError('aging_seconds is for policy="priority": under "fcfs" nobody ages')
        # Each running request needs a token of each step; with chunked prefill it could wait.
        if not self.has_chunked_prefill and self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: a step could not decode all running requests"
            )
