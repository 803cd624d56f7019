"""One `StepRecord` per engine step, the same schema in every milestone."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.protocols import QueueState, SettledStep
from milestone_llm.core.request import Request, RequestStatus, SampledToken

_FIELDS = (
    *("step", "milestone", "schedule_ms", "execute_ms", "update_ms", "batch"),
    *("num_prefill_tokens", "num_decode_tokens", "num_padding_tokens", "start_s"),
    *("waiting", "running", "swapped", "waiting_reasons", "arrived"),
    *("admitted", "resumed", "preempted", "finished", "kv", "events"),
)
"""Names and order in a JSON line."""
_KV_FIELDS = (
    *("unit", "total", "used", "free", "cached", "watermark", "reserved_tokens", "stored_tokens"),
)


@dataclass(frozen=True)
class BatchRow:
    """One row of a step's batch, as the step computed it."""

    request_id: str
    phase: str
    start: int
    num_new_tokens: int
    num_cached_tokens: int
    sampled_token: int | None
    blocks: list[int]


@dataclass
class StepRecord:
    """One engine step. `batch` is what was computed; queues and `kv` are as the step left them.

    m5_kernels leaves a step when it has planned the next one: there they are one plan ahead.
    `start_s` is seconds since the trace began. `arrived` came since the step before was planned.
    `waiting_reasons` says of those at the head of the queue why the scheduler left them there;
    those further back wait behind them. `events` are in the order in which they happened: those of
    planning, then what followed until the next step was planned.
    """

    step: int
    milestone: str
    schedule_ms: float
    execute_ms: float
    update_ms: float
    batch: list[BatchRow]
    num_prefill_tokens: int
    num_decode_tokens: int
    num_padding_tokens: int
    waiting: list[str]
    running: list[str]
    swapped: list[str]
    admitted: list[str]
    resumed: list[str]
    preempted: list[dict[str, str]]
    finished: list[dict[str, str]]
    kv: KVUsage
    events: list[KVEvent] = field(default_factory=list)
    start_s: float = 0.0
    waiting_reasons: dict[str, str] = field(default_factory=dict)
    arrived: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, step: SettledStep, queues: QueueState, start: float | None = None) -> StepRecord:
        """The record of a settled step.

        Args:
            queues: they and KV memory as they are now.
            start: when the trace began, in seconds of `time.perf_counter()`; None: now.
        """
        plan = step.plan
        schedule_ms, execute_ms, update_ms = (
            round((end - start) * 1e3, 3) for start, end in itertools.pairwise(step.times)
        )
        rows = batch_rows(plan, step.sampled)
        num_decode_tokens = sum(row.phase == "decode" for row in rows)
        queued = list(queues.waiting)
        return cls(
            step=step.number,
            milestone=step.milestone,
            schedule_ms=schedule_ms,
            execute_ms=execute_ms,
            update_ms=update_ms,
            batch=rows,
            num_prefill_tokens=plan.num_tokens - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
            num_padding_tokens=plan.num_padding_tokens,
            waiting=_ids(r for r in queued if r.status is RequestStatus.WAITING),
            running=_ids(queues.running),
            swapped=_ids(r for r in queued if r.status is RequestStatus.SWAPPED),
            admitted=_ids(plan.admitted),
            resumed=_ids(plan.resumed),
            preempted=[
                {"request_id": p.request.request_id, "reason": p.reason} for p in plan.preempted
            ],
            finished=[{"request_id": name, "reason": reason} for name, reason in step.finished],
            kv=queues.kv_usage(),
            events=step.events,
            start_s=0.0 if start is None else round(step.times[0] - start, 6),
            waiting_reasons=plan.waiting_reasons,
            arrived=step.arrived,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> StepRecord:
        """The record of which `to_dict` made this.

        Raises:
            KeyError, TypeError: it is of something else.
        """
        fields = {name: data[name] for name in _FIELDS}
        kv = dict(fields["kv"])
        del kv["free"]  # follows from the others
        fields["kv"] = KVUsage(**kv)
        fields["batch"] = [BatchRow(**row) for row in fields["batch"]]
        fields["events"] = [KVEvent(**event) for event in fields["events"]]
        return cls(**fields)

    def to_dict(self, has_batch: bool = True) -> dict[str, Any]:
        """The record as plain data, in the order and with the names of the JSON lines.

        Without its batch, for a caller that writes the rows itself.
        """
        data: dict[str, Any] = {name: getattr(self, name) for name in _FIELDS}
        if has_batch:
            data["batch"] = [dict(vars(row)) for row in self.batch]
        data["kv"] = {name: getattr(self.kv, name) for name in _KV_FIELDS}
        data["events"] = [_plain(event) for event in self.events]
        return data


def _ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def _plain(event: KVEvent | dict[str, Any]) -> dict[str, Any]:
    data = dict(event if isinstance(event, dict) else vars(event))
    return data if data.get("held") else {k: v for k, v in data.items() if k != "held"}


def batch_rows(plan: StepPlan, sampled: dict[str, SampledToken]) -> list[BatchRow]:
    """The rows of an executed plan."""
    rows = []
    for row in plan.rows:
        request_id = row.request.request_id
        token = None if row.is_padding else sampled.get(request_id)
        rows.append(
            BatchRow(
                request_id=request_id,
                phase=row.phase,
                start=row.start,
                num_new_tokens=row.num_new_tokens,
                num_cached_tokens=row.num_cached_tokens,
                sampled_token=token.token_id if token else None,
                blocks=row.blocks,
            )
        )
    return rows
