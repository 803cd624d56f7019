"""What M2 adds to the configuration: in which order requests are served."""

from __future__ import annotations

from dataclasses import dataclass

from milestone_llm.core.errors import InputError
from milestone_llm.frontend import config as base


@dataclass(frozen=True)
class EngineConfig(base.EngineConfig):
    """Limits and switches of a continuously batching engine."""

    policy: str = "fcfs"
    """"fcfs": first come, first served. "priority": by (priority, arrival), lower is sooner."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.policy not in ("fcfs", "priority"):
            raise InputError(f'policy must be "fcfs" or "priority", got {self.policy!r}')
        self.check_step_budget()

    def check_step_budget(self) -> None:
        """A step must have room for one token of every running request.

        Raises:
            InputError: `max_num_batched_tokens` is less than `max_num_seqs`.
        """
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InputError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: a step could not decode all running requests"
            )
