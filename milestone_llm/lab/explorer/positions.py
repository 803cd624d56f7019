"""Which computed token positions were needed. Only this module decides it."""

from __future__ import annotations

from collections.abc import Sequence

from milestone_llm.frontend.step_log import RecomputedPositions
from milestone_llm.trace.records import StepRecord


class Positions:
    """Counts the positions of a run, step by step: all that were computed, and those needed.

    Padding is not needed, and neither are positions that were computed again after a preemption.
    """

    def __init__(self) -> None:
        self.computed = self.useful = 0
        self._recomputed = RecomputedPositions()

    def take(self, record: StepRecord) -> None:
        """Count one more step."""
        self.computed += record.num_padding_tokens
        for row in record.batch:
            if row.phase != "padding":
                num_again = self._recomputed.take(row.request_id, row.start, row.end)
                self.computed += row.num_new_tokens
                self.useful += row.num_new_tokens - num_again
        for ended in record.finished:  # its id may be used again
            self._recomputed.forget(ended["request_id"])


def useful_share(records: Sequence[StepRecord]) -> float:
    """Return the needed share of a run's computed positions, 0..1 (1 if none were computed)."""
    positions = Positions()
    for record in records:
        positions.take(record)
    return positions.useful / positions.computed if positions.computed else 1.0
