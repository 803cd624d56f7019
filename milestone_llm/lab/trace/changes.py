"""Which steps of a long trace are worth showing: those in which something changed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from milestone_llm.lab.trace.records import StepRecord

from .text import plural

_EVENTS = {"copy_on_write", "swap_out", "swap_in"}
"""Other events belong to every step that decodes."""


def steps_with_changes(records: list[StepRecord]) -> list[StepRecord]:
    """The first step, the last, and each in which something changed.

    That is: a request began to wait, was admitted, finished, preempted or resumed; a block was
    copied or swapped; the number of rows in a phase is not what it was one step earlier.
    """
    changed = [after for before, after in pairwise(records) if _has_change(before, after)]
    steps = {record.step for record in [*records[:1], *changed, *records[-1:]]}
    return [record for record in records if record.step in steps]


def _has_change(before: StepRecord, record: StepRecord) -> bool:
    phases, phases_before = (Counter(row.phase for row in one.batch) for one in (record, before))
    return bool(
        phases != phases_before
        or set(record.waiting) - set(before.waiting)
        or record.admitted
        or record.finished
        or record.preempted
        or record.resumed
        or any(event.type in _EVENTS for event in record.events)
    )


def gap_text(before: StepRecord, after: StepRecord) -> str:
    """What stands between two records that are shown; empty when they are neighbours."""
    count = after.step - before.step - 1
    return f"{plural(count, 'step')} like step {before.step}" if count > 0 else ""
