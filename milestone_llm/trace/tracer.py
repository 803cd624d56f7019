"""The debug tracer: one `StepRecord` per engine step, the same schema in every milestone.

Records stay in memory (`engine.tracer.records`) and can be printed (`trace="console"` or
`LLM_TRACE=1`) or written as one JSON line each (`trace="steps.jsonl"`). `m1_single.timeline`
draws such a file. When tracing is off, the engine skips all of it with one test for None.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from milestone_llm.engine.plan import StepPlan
from milestone_llm.engine.request import Request, RequestStatus, SampledToken


@dataclass(frozen=True)
class KVUsage:
    """How full the KV cache is after a step.

    `total`, `used`, `free`, `cached` and `watermark` (most ever used) count `unit`s: `token` in M1,
    `slot` (one request's contiguous region) in M2, `block` from M3 on.
    """

    unit: str
    total: int
    used: int
    watermark: int
    reserved_tokens: int
    """Tokens that the used units could hold."""
    stored_tokens: int
    """Tokens of unfinished requests that they do hold."""
    cached: int = 0
    """Free blocks whose content the prefix cache can still use (from M4 on)."""

    @property
    def free(self) -> int:
        """Units that nobody owns."""
        return self.total - self.used


@dataclass(frozen=True)
class KVEvent:
    """Something that happened to KV memory: `alloc`, `free`, `share`, `copy_on_write`, `evict`,
    `swap_out` or `swap_in`. `blocks` are slot numbers in M2, block numbers from M3 on.
    """

    type: str
    request_id: str | None
    blocks: list[int]


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
    """One engine step. `batch` is what was computed; queues and `kv` are as the step left them."""

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

    @classmethod
    def of(
        cls,
        *,
        step: int,
        milestone: str,
        times: list[float],
        plan: StepPlan,
        rows: list[BatchRow],
        scheduler: Any,
        finished: list[Request],
        events: list[KVEvent],
    ) -> StepRecord:
        """The record of a plan that has been carried out.

        Args:
            times: seconds at start, after schedule, after execute and after update.
            scheduler: asked for its queues and its KV usage as they are now.
        """
        schedule_ms, execute_ms, update_ms = (
            round((end - start) * 1e3, 3) for start, end in itertools.pairwise(times)
        )
        num_decode_tokens = sum(row.phase == "decode" for row in rows)
        return cls(
            step=step,
            milestone=milestone,
            schedule_ms=schedule_ms,
            execute_ms=execute_ms,
            update_ms=update_ms,
            batch=rows,
            num_prefill_tokens=plan.num_tokens - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
            num_padding_tokens=plan.num_padding_tokens,
            waiting=_ids(r for r in scheduler.waiting if r.status is RequestStatus.WAITING),
            running=_ids(scheduler.running),
            swapped=_ids(r for r in scheduler.waiting if r.status is RequestStatus.SWAPPED),
            admitted=_ids(plan.admitted),
            resumed=_ids(plan.resumed),
            preempted=[
                {"request_id": p.request.request_id, "reason": p.reason} for p in plan.preempted
            ],
            finished=[
                {"request_id": request.request_id, "reason": str(request.finish_reason)}
                for request in finished
            ],
            kv=scheduler.kv_usage(),
            events=events,
        )

    def to_dict(self) -> dict[str, Any]:
        """The record as plain data, in the order and with the names of the JSON lines."""
        data = asdict(self)
        kv = data["kv"]
        data["kv"] = {
            "unit": kv["unit"],
            "total": kv["total"],
            "used": kv["used"],
            "free": self.kv.free,
            "cached": kv["cached"],
            "watermark": kv["watermark"],
            "reserved_tokens": kv["reserved_tokens"],
            "stored_tokens": kv["stored_tokens"],
        }
        return data


def _ids(requests: Iterable[Request]) -> list[str]:
    return [request.request_id for request in requests]


def batch_rows(plan: StepPlan, sampled: dict[str, SampledToken]) -> list[BatchRow]:
    """The rows of a plan that has been executed but not yet `update`d (which frees blocks)."""
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
                blocks=list(row.blocks),
            )
        )
    return rows


class Tracer:
    """Keeps `StepRecord`s and passes each on to the sinks it was given."""

    def __init__(self, sinks: list[Callable[[StepRecord], None]] | None = None) -> None:
        self.records: list[StepRecord] = []
        self.sinks = sinks or []

    def record(self, record: StepRecord) -> None:
        """Keep one record and show or write it."""
        self.records.append(record)
        for sink in self.sinks:
            sink(record)

    @classmethod
    def from_option(cls, option: str | None) -> Tracer | None:
        """The tracer for `EngineConfig.trace`, or None when nothing is to be traced.

        Args:
            option: "console", "memory" (records are kept, nothing is shown), a path that ends in
                .jsonl, or None, which leaves the word to the environment variable `LLM_TRACE`.

        Raises:
            ValueError: the option is none of these.
        """
        option = option or {"1": "console"}.get(os.environ.get("LLM_TRACE", ""))
        if option is None:
            return None
        if option == "memory":
            return cls()
        if option == "console":
            from .console import ConsoleSink

            return cls([ConsoleSink()])
        if option.endswith(".jsonl"):
            return cls([JsonlSink(Path(option))])
        raise ValueError(f'trace must be "console", "memory" or a path in .jsonl, got {option!r}')


class JsonlSink:
    """Writes one JSON line a record; each is on disk when the step returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")

    def __call__(self, record: StepRecord) -> None:
        """Append one line."""
        self._file.write(json.dumps(record.to_dict()) + "\n")
        self._file.flush()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The records of a trace file as plain data.

    Raises:
        ValueError: a line is no JSON, or lacks a field; the message names the line.
    """
    records = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                record["step"], record["batch"], record["kv"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a trace record ({error!r})") from None
            records.append(record)
    return records
