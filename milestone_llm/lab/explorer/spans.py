"""Phases of each request over a run, for drawing. Pure data in, pure data out.

A request has one phase in each step: that of its row in the batch; without a row it is `swapped`,
`waiting` or `preempted`, by the queue it was in after the step. Equal phases in consecutive steps
are merged into one `Span`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from milestone_llm.trace.records import StepRecord, step_events

MARKED = ("finished", "preempted", "resumed", "copy_on_write")


@dataclass(frozen=True)
class Span:
    """A request in one phase from `first_step` to `last_step`, both included."""

    request_id: str
    phase: str
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Mark:
    """An event of a request in a step.

    `kind` is one of `MARKED`. `has_row` says whether the step computed the request: one that
    finishes without a row was aborted before the step began.
    """

    request_id: str
    kind: str
    step: int
    reason: str = ""
    has_row: bool = False


def request_spans(records: Sequence[StepRecord]) -> list[Span]:
    """Return the spans of all requests, by request in order of arrival, then by step.

    A request without a row is `swapped` or `waiting`, as the queues of the record say; a waiting
    one that was computed before is `preempted`. One that runs but got no row in a step (the token
    budget was spent) counts as waiting. A step that is missing from the trace ends a span.
    """
    spans: dict[str, list[Span]] = {request_id: [] for request_id in arrival_order(records)}
    has_run: set[str] = set()
    for record in records:
        phases = dict.fromkeys(record.running, "waiting")
        for name in record.waiting:
            phases[name] = "preempted" if name in has_run else "waiting"
        phases |= dict.fromkeys(record.swapped, "swapped")
        # a row is stronger than a queue
        phases |= {row.request_id: row.phase for row in record.batch}
        for request_id, phase in phases.items():
            own = spans[request_id]
            if own and own[-1].phase == phase and own[-1].last_step == record.step - 1:
                own[-1] = replace(own[-1], last_step=record.step)
            else:
                own.append(Span(request_id, phase, record.step, record.step))
        has_run.update(row.request_id for row in record.batch)
    return [span for own in spans.values() for span in own]


def arrival_order(records: Sequence[StepRecord]) -> list[str]:
    """Return request ids in the order in which the trace first has them: rows before queues."""
    order: dict[str, None] = {}
    for record in records:
        order |= dict.fromkeys(row.request_id for row in record.batch)
        order |= dict.fromkeys(record.running + record.swapped + record.waiting)
        order |= dict.fromkeys(ended["request_id"] for ended in record.finished)
    return list(order)


def request_marks(records: Sequence[StepRecord]) -> list[Mark]:
    """Return the events of requests, step by step."""
    return [
        Mark(event.request_id, event.kind, record.step, event.reason, event.request_id in rows)
        for record in records
        for rows in [{row.request_id for row in record.batch}]
        for event in step_events(record)
        if event.request_id is not None and event.kind in MARKED
    ]
