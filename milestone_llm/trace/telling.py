"""Which steps of a long trace are worth showing: those in which something changed."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from milestone_llm.trace.records import StepRecord

_TELLING_EVENTS = {"copy_on_write", "swap_out", "swap_in"}


def telling_records(records: list[StepRecord]) -> list[StepRecord]:
    """The first step, the last, and each in which something changed.

    That is: a request began to wait, was admitted, finished, preempted or resumed; a block was
    copied or swapped; the number of rows in a phase is not what it was one step earlier.
    """
    changed = [after for before, after in pairwise(records) if _has_change(before, after)]
    ends = [records[0], records[-1]] if records else []
    steps = {record.step for record in changed + ends}
    return [record for record in records if record.step in steps]


def _has_change(before: StepRecord, record: StepRecord) -> bool:
    return bool(
        _mix(record) != _mix(before)
        or set(record.waiting) - set(before.waiting)
        or record.admitted
        or record.finished
        or record.preempted
        or record.resumed
        or any(event.type in _TELLING_EVENTS for event in record.events)
    )


def _mix(record: StepRecord) -> Counter[str]:
    return Counter(row.phase for row in record.batch)


def gap_text(before: StepRecord, after: StepRecord) -> str:
    """What stands between two records that are shown; empty when they are neighbours."""
    count = after.step - before.step - 1
    if count <= 0:
        return ""
    steps = "1 step" if count == 1 else f"{count:,} steps"
    return f"{steps} like step {before.step}"
