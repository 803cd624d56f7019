"""From step records to the bars of a Gantt chart. Pure data in, pure data out; nothing is drawn.

A request is in one phase per step: that of its row in the batch, else `swapped`, `waiting` or
`preempted`, by the queue the step left it in. Equal neighbours merge into one `Span`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any


@dataclass(frozen=True)
class Span:
    """A request in one phase from `first_step` to `last_step`, both included."""

    request_id: str
    phase: str
    first_step: int
    last_step: int


@dataclass(frozen=True)
class Mark:
    """Something that happened to a request in a step.

    `kind` is `finished`, `preempted`, `resumed` or `copy_on_write`. `has_row` tells whether the
    step computed the request: one that finishes without a row was aborted before the step began.
    """

    request_id: str
    kind: str
    step: int
    reason: str = ""
    has_row: bool = False


def request_spans(records: list[dict[str, Any]]) -> list[Span]:
    """The spans of all requests, by request in order of arrival, then by step.

    A request without a row is `swapped` or `waiting` as the queues of the record say; a waiting
    one that was computed before is `preempted`. One that runs but got no row in a step (the token
    budget was spent) counts as waiting. A step that is missing from the trace ends a span.

    Raises:
        ValueError: step numbers do not grow, so the records are not of one run.
    """
    check_one_run(records)
    spans: dict[str, list[Span]] = {request_id: [] for request_id in arrival_order(records)}
    has_run: set[str] = set()
    for record in records:
        step = record["step"]
        for request_id, phase in _phases(record, has_run).items():
            of_request = spans[request_id]
            last = of_request[-1] if of_request else None
            if last and last.phase == phase and last.last_step == step - 1:
                of_request[-1] = Span(request_id, phase, last.first_step, step)
            else:
                of_request.append(Span(request_id, phase, step, step))
    return [span for of_request in spans.values() for span in of_request]


def _phases(record: dict[str, Any], has_run: set[str]) -> dict[str, str]:
    """Request -> phase in this step. Adds the requests that have a row to `has_run`."""
    phases = dict.fromkeys(record["running"], "waiting")
    for request_id in record["waiting"]:
        phases[request_id] = "preempted" if request_id in has_run else "waiting"
    phases.update(dict.fromkeys(record["swapped"], "swapped"))
    for row in record["batch"]:  # last, for a row outweighs the queue the step ended in
        phases[row["request_id"]] = row["phase"]
        has_run.add(row["request_id"])
    return phases


def arrival_order(records: list[dict[str, Any]]) -> list[str]:
    """Request ids in the order in which the trace first names them: rows before queues."""
    order: dict[str, None] = {}
    for record in records:
        order.update((row["request_id"], None) for row in record["batch"])
        for queue in ("running", "swapped", "waiting"):
            order.update(dict.fromkeys(record[queue]))
        order.update((entry["request_id"], None) for entry in record["finished"])
    return list(order)


def request_marks(records: list[dict[str, Any]]) -> list[Mark]:
    """What happened to requests, step by step."""
    marks = []
    for record in records:
        step = record["step"]
        rows = {row["request_id"] for row in record["batch"]}
        for entry in record["preempted"]:
            marks.append(Mark(entry["request_id"], "preempted", step, entry["reason"]))
        for request_id in record["resumed"]:
            marks.append(Mark(request_id, "resumed", step, "", request_id in rows))
        for event in record["events"]:
            if event["type"] == "copy_on_write" and event["request_id"] is not None:
                name = event["request_id"]
                marks.append(Mark(name, "copy_on_write", step, "", name in rows))
        for entry in record["finished"]:
            name = entry["request_id"]
            marks.append(Mark(name, "finished", step, entry["reason"], name in rows))
    return marks


def useful_share(records: list[dict[str, Any]]) -> float:
    """Share of the computed token positions that were not padding, 0..1 (1 when none were)."""
    useful = sum(record["num_prefill_tokens"] + record["num_decode_tokens"] for record in records)
    padding = sum(record["num_padding_tokens"] for record in records)
    return useful / (useful + padding) if useful + padding else 1.0


def check_one_run(records: list[dict[str, Any]]) -> None:
    """Raise `ValueError` unless there are records and their step numbers grow."""
    if not records:
        raise ValueError("the trace has no steps")
    for before, after in pairwise(records):
        if after["step"] <= before["step"]:
            raise ValueError(
                f"step {after['step']} follows step {before['step']}: the trace holds several runs"
            )
