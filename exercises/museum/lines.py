"""A step of a trace in a few short lines, so that two runs fit side by side."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from milestone_llm.lab.trace.records import BatchRow, StepEvent, StepRecord, step_events
from milestone_llm.lab.trace.text import id_ranges


def lines(record: StepRecord) -> list[str]:
    """What was computed, what happened in its order, who waits and why, and the free blocks.

    b 4..7 → 31  [0 2]            row of b: positions computed, token sampled, block table
    share 0 (b)                   b's table has block 0, too
    """
    return list(_lines(record))


def _lines(record: StepRecord) -> Iterator[str]:
    for row in record.batch:
        yield _row(row)
    for kind, group in groupby(step_events(record), lambda event: event.kind):
        if kind == "arrived":
            yield f"arrived {' '.join(str(event.request_id) for event in group)}"
        elif kind != "admitted":  # its row says so
            yield from map(_event, group)
    for name, reason in record.waiting_reasons.items():
        yield f"waits {name}: {reason}"
    others = [name for name in record.waiting if name not in record.waiting_reasons]
    if others:
        yield f"waits {' '.join(others)}"
    cached = f", {record.kv.cached} cached" if record.kv.cached else ""
    yield f"free {record.kv.free} of {record.kv.total}{cached}"


def _row(row: BatchRow) -> str:
    if row.phase == "padding":
        return f"{row.request_id} in vain"
    last = row.start + row.num_new_tokens - 1
    where = f"{row.start}..{last}" if row.num_new_tokens > 1 else str(row.start)
    if row.num_new_tokens < 1:
        where = "nothing"
    sampled = "" if row.sampled_token is None else f" → {row.sampled_token}"
    if row.num_draft_tokens:
        sampled += f" {row.num_accepted_tokens} of {row.num_draft_tokens} guesses"
    cached = f" {row.num_cached_tokens} cached" if row.num_cached_tokens else ""
    return f"{row.request_id} {where}{sampled}{cached} [{' '.join(id_ranges(row.blocks or []))}]"


def _event(event: StepEvent) -> str:
    if not event.blocks:
        return f"{event.kind} {event.request_id}" + (f": {event.reason}" if event.reason else "")
    joint = "→" if event.kind == "copy_on_write" else " "
    blocks = (
        joint.join(map(str, event.blocks)) if joint == "→" else " ".join(id_ranges(event.blocks))
    )
    return f"{event.kind} {blocks}" + (f" ({event.request_id})" if event.request_id else "")
