"""A run as Chrome's trace JSON, for ui.perfetto.dev or chrome://tracing.

    track  host       |schedule 3|launch 3, collect 2      |settle 2|schedule 4|...
    track  step 0, 2  |step 2 .......................................|
    track  step 1, 3             |step 3 ...

A step that is settled after the next was planned (m5_kernels) overlaps with it, so steps take turns
on two tracks. Requests are async slices: their time in the engine, and within it each phase.
Counters show rows, tokens and KV memory. A trace has no time between launch and collect, so these
are one slice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .records import StepRecord

Event = dict[str, Any]

_HOST, _REQUESTS, _FIRST_STEP_TRACK = 1, 2, 3


def write_chrome(runs: Sequence[Sequence[StepRecord]], path: Path) -> Path:
    """Write runs, each as a process of its own; returns the path."""
    events = [event for number, records in enumerate(runs, 1) for event in _run(records, number)]
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {"displayTimeUnit": "ms", "traceEvents": sorted(events, key=_order)}
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n", encoding="utf-8")
    return path


def _order(event: Event) -> tuple[float, int]:
    """By time; names of tracks first, and what ends before what begins at the same time."""
    return (event["ts"], {"M": 0, "E": 1, "e": 1}.get(event["ph"], 2))


def _run(records: Sequence[StepRecord], pid: int) -> Iterator[Event]:
    names = {0: records[0].milestone, _HOST: "host", _REQUESTS: "requests"}
    names |= {_FIRST_STEP_TRACK + i: f"steps {i}, {i + 2}, ..." for i in (0, 1)}
    for tid, name in names.items():
        kind = "process_name" if tid == 0 else "thread_name"
        yield {"ph": "M", "ts": 0, "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}
    yield from ({**event, "pid": pid} for event in _steps(records))
    yield from ({**event, "pid": pid} for event in _requests(records))
    yield from ({**event, "pid": pid} for event in _counters(records))


def _times(record: StepRecord) -> list[int]:
    """Begin, planned, executed, settled; in nanoseconds, so that sums are exact."""
    times = [round(record.start_s * 1e9)]
    for ms in (record.schedule_ms, record.execute_ms, record.update_ms):
        times.append(times[-1] + round(ms * 1e6))
    return times


def _slice(tid: int, name: str, begin: int, end: int, **args: Any) -> Iterator[Event]:
    """A slice of a track, in microseconds; an empty one would only be in the way."""
    if end > begin:
        yield {"ph": "B", "ts": begin / 1000, "tid": tid, "name": name, "args": args}
        yield {"ph": "E", "ts": end / 1000, "tid": tid, "name": name}


def _steps(records: Sequence[StepRecord]) -> Iterator[Event]:
    is_free = [0, 0]  # from when on each track has room
    host: list[tuple[int, int, str, int]] = []  # begin, end, what, step
    for index, record in enumerate(records):
        begin, planned, executed, settled = _times(record)
        host += [(begin, planned, "schedule", record.step)]
        host += [(executed, settled, "settle", record.step)]
        track, begin = index % 2, max(begin, is_free[index % 2])  # times are rounded
        tokens = {
            name: getattr(record, f"num_{name}_tokens") for name in ("prefill", "decode", "padding")
        }
        name = f"step {record.step}"
        yield from _slice(_FIRST_STEP_TRACK + track, name, begin, settled, **tokens)
        is_free[track] = max(begin, settled)
    yield from _host(sorted(host))


def _host(parts: Sequence[tuple[int, int, str, int]]) -> Iterator[Event]:
    """What the host did, one thing after the other, and in between launch and collect."""
    end, last, last_step = 0, "settle", 0
    for begin, until, what, step in parts:
        between = [f"launch {last_step}"] if last == "schedule" else []
        between += [f"collect {step}"] if what == "settle" else []
        if between:
            yield from _slice(_HOST, ", ".join(between), end, begin)
        yield from _slice(_HOST, f"{what} {step}", max(begin, end), until)
        end, last, last_step = max(end, until), what, step


def _requests(records: Sequence[StepRecord]) -> Iterator[Event]:
    """A slice for a request from its arrival to its end, and inside one for each phase."""
    opened: dict[str, str] = {}  # phase of each request that is in the engine
    numbers: dict[str, int] = {}

    def event(ph: str, ts: int, name: str, label: str) -> Event:
        number = numbers.setdefault(name, len(numbers))
        where = {"cat": "request", "id": number, "tid": _REQUESTS}
        return {"ph": ph, "ts": ts / 1000, "name": label, **where}

    ts = 0
    for record in records:
        begin, _, _, settled = _times(record)
        begin = max(begin, ts)  # never before the end of what came earlier
        for name, phase in _phases(record).items():
            if name not in opened:
                yield event("b", begin, name, name)
            elif opened[name] != phase:
                yield event("e", begin, name, opened[name])
            if opened.get(name) != phase:
                yield event("b", begin, name, phase)
                opened[name] = phase
        ts = begin
        for ended in record.finished:
            name = ended["request_id"]
            if name in opened:
                ts = max(settled, begin)
                yield event("e", ts, name, opened.pop(name))
                yield event("e", ts, name, name)
    end = max([ts, *(_times(record)[-1] for record in records[-2:])])
    for name, phase in opened.items():
        yield event("e", end, name, phase)
        yield event("e", end, name, name)


def _phases(record: StepRecord) -> dict[str, str]:
    """A request that ended before has a row of padding at most: it is no phase of a request."""
    rows = {row.request_id: row.phase for row in record.batch if row.phase != "padding"}
    waits = dict.fromkeys([*record.running, *record.waiting], "waiting")
    return {**waits, **dict.fromkeys(record.swapped, "swapped"), **rows}


def _counters(records: Sequence[StepRecord]) -> Iterator[Event]:
    for record in records:
        counters = {
            "rows": {"rows": len(record.batch)},
            "tokens of the step": {
                "decode": record.num_decode_tokens,
                "prefill": record.num_prefill_tokens,
                "padding": record.num_padding_tokens,
            },
            f"KV {record.kv.unit}s": {"used": record.kv.used, "cached": record.kv.cached},
            "queue": {"waiting": len(record.waiting), "swapped": len(record.swapped)},
        }
        for name, values in counters.items():
            ts = _times(record)[0] / 1000
            yield {"ph": "C", "ts": ts, "tid": 0, "name": name, "args": values}
