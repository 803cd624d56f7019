"""From step records to the bars of a Gantt chart. Pure data in, pure data out; nothing is drawn.

A request is in one phase per step: that of its row in the batch, else `swapped`, `waiting` or
`preempted`, by the queue the step left it in. Equal neighbours merge into one `Span`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

Record = dict[str, Any]
"""As `read_jsonl` or `StepRecord.to_dict` give them."""


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


def request_spans(records: Sequence[Record]) -> list[Span]:
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
            own = spans[request_id]
            if own and own[-1].phase == phase and own[-1].last_step == step - 1:
                own[-1] = replace(own[-1], last_step=step)
            else:
                own.append(Span(request_id, phase, step, step))
        has_run.update(row["request_id"] for row in record["batch"])
    return [span for own in spans.values() for span in own]


def _phases(record: Record, has_run: set[str]) -> dict[str, str]:
    """Request -> phase in this step. A row outweighs the queue in which the step ended."""
    return {
        **dict.fromkeys(record["running"], "waiting"),
        **{name: "preempted" if name in has_run else "waiting" for name in record["waiting"]},
        **dict.fromkeys(record["swapped"], "swapped"),
        **{row["request_id"]: row["phase"] for row in record["batch"]},
    }


def arrival_order(records: Sequence[Record]) -> list[str]:
    """Request ids in the order in which the trace first names them: rows before queues."""
    order: dict[str, None] = {}
    for record in records:
        order |= dict.fromkeys(row["request_id"] for row in record["batch"])
        order |= dict.fromkeys(record["running"] + record["swapped"] + record["waiting"])
        order |= dict.fromkeys(entry["request_id"] for entry in record["finished"])
    return list(order)


def request_marks(records: Sequence[Record]) -> list[Mark]:
    """What happened to requests, step by step."""
    marks = []
    for record in records:
        rows = {row["request_id"] for row in record["batch"]}
        happened = [(one["request_id"], "preempted", one["reason"]) for one in record["preempted"]]
        happened += [(name, "resumed", "") for name in record["resumed"]]
        copies = [event for event in record["events"] if event["type"] == "copy_on_write"]
        happened += [(event["request_id"], "copy_on_write", "") for event in copies]
        happened += [(one["request_id"], "finished", one["reason"]) for one in record["finished"]]
        for name, kind, reason in happened:
            marks.append(Mark(name, kind, record["step"], reason, name in rows))
    return marks


def useful_share(records: Sequence[Record]) -> float:
    """Share of the computed token positions that were needed, 0..1 (1 when none were computed).

    Padding is not, and neither is what a preempted request had computed before.
    """
    computed = useful = 0
    once_computed: dict[str, int] = {}
    for record in records:
        computed += record["num_padding_tokens"]
        for row in record["batch"]:
            if row["phase"] != "padding":
                name, start = row["request_id"], row["start"]
                end = start + row["num_new_tokens"]
                before = once_computed.get(name, 0)
                computed += end - start
                useful += end - min(end, max(start, before))
                once_computed[name] = max(end, before)
        for ended in record["finished"]:  # its name may come again
            once_computed.pop(ended["request_id"], None)
    return useful / computed if computed else 1.0


def check_one_run(records: Sequence[Record]) -> None:
    """Raise `ValueError` unless there are records and their step numbers grow."""
    if not records:
        raise ValueError("the trace has no steps")
    for before, after in pairwise(record["step"] for record in records):
        if after <= before:
            raise ValueError(f"step {after} follows step {before}: the trace holds several runs")


def tokens_per_unit(records: Sequence[Record]) -> int:
    """Tokens of a block or slot; 0 if none was in use after any step."""
    usage = [record["kv"] for record in records]
    return max((kv["reserved_tokens"] // kv["used"] for kv in usage if kv["used"]), default=0)


def kv_during_steps(records: Sequence[Record]) -> list[tuple[int, int, int]]:
    """Tokens stored, reserved but empty, free but cached: all while each step was computed.

    A record's own numbers are those after the step: a request that finished in it has given its
    memory back. Here that memory is still counted, so that KV ends where the request's bar ends.
    """
    size = tokens_per_unit(records)
    during, cached_before = [], 0
    for record in records:
        kv, gone = record["kv"], {one["request_id"] for one in record["finished"]}
        stored, reserved, cached = kv["stored_tokens"], kv["reserved_tokens"], kv["cached"]
        ended = [row for row in record["batch"] if row["request_id"] in gone]
        if ended:
            kept = {b for row in record["batch"] if row not in ended for b in row["blocks"]}
            freed = {block for row in ended for block in row["blocks"]} - kept
            for row in ended:  # what a sharer keeps is counted already
                stored += max(0, row_end(row) - size * len(kept.intersection(row["blocks"])))
            reserved += size * len(freed)
            cached = min(cached, cached_before)
            if kv["unit"] == "token" and not reserved:  # a static batch gives all back at once
                reserved = len(record["batch"]) * max(map(row_end, record["batch"]))
        cached_before = kv["cached"]
        stored = min(stored, reserved)
        during.append((stored, reserved - stored, cached * size))
    return during


def row_end(row: Record) -> int:
    """Tokens of its request that a row of the batch leaves in the KV cache."""
    return int(row["start"]) + int(row["num_new_tokens"])
