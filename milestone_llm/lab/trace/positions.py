"""Which of the computed token positions were needed: the one place that says so."""

from __future__ import annotations

from collections.abc import Sequence

from milestone_llm.trace.records import StepRecord


class Positions:
    """Counts the positions of a run, step by step: all that were computed, and those needed.

    Padding is not needed, and neither is what a preempted request had computed before.
    """

    def __init__(self) -> None:
        self.computed = self.useful = 0
        self._once_computed: dict[str, int] = {}

    def take(self, record: StepRecord) -> None:
        """Count one more step."""
        self.computed += record.num_padding_tokens
        for row in record.batch:
            if row.phase != "padding":
                before = self._once_computed.get(row.request_id, 0)
                self.computed += row.num_new_tokens
                self.useful += row.end - min(row.end, max(row.start, before))
                self._once_computed[row.request_id] = max(row.end, before)
        for ended in record.finished:  # its name may come again
            self._once_computed.pop(ended["request_id"], None)


def useful_share(records: Sequence[StepRecord]) -> float:
    """Share of the computed positions of a run that were needed, 0..1 (1 if none were computed)."""
    positions = Positions()
    for record in records:
        positions.take(record)
    return positions.useful / positions.computed if positions.computed else 1.0
