"""A run as events for https://ui.perfetto.dev, in Chrome's trace format.

A run is a process. Its tracks are the host's parts of each step, the device's kernels where a
profiler has run, and a track for each request with its rows. Kernels are known one by one only for
steps whose record lists them; for the others there is one bar from the first to the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from milestone_llm.trace.records import StepRecord

from .page import Run
from .spans import arrival_order

HOST, DEVICE, FIRST_REQUEST = 1, 2, 3
PARTS = ("schedule", "execute", "update")


def perfetto_trace(runs: Sequence[Run]) -> dict[str, Any]:
    """Return a trace as plain data, to be written as JSON. Times are in microseconds."""
    events = [each for number, run in enumerate(runs, 1) for each in _events(number, run)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _events(process: int, run: Run) -> Iterator[dict[str, Any]]:
    tracks = {name: place for place, name in enumerate(arrival_order(run.records), FIRST_REQUEST)}
    yield _name("process", process, 0, run.title)
    yield _name("thread", process, HOST, "host")
    if any(record.device for record in run.records):
        yield _name("thread", process, DEVICE, "device")
    for name, track in tracks.items():
        yield _name("thread", process, track, name)
    for record in run.records:
        start = record.start_s * 1e6
        for name, at, us in _host(record):
            yield _bar(process, HOST, name, start + at, us, {"step": record.step})
        for name, at, us in _device(record):
            yield _bar(process, DEVICE, name, start + at, us, {"step": record.step})
        us = 1e3 * (record.schedule_ms + record.execute_ms + record.update_ms)
        for row in record.batch:
            more = {"step": record.step, "start": row.start, "tokens": row.num_new_tokens}
            yield _bar(process, tracks[row.request_id], row.phase, start, us, more)


def _host(record: StepRecord) -> Iterable[tuple[str, float, float]]:
    """Return the host's parts: name, microseconds from the step's start, and duration."""
    if record.device:
        return [(each["name"], each["start_us"], each["us"]) for each in record.device["host"]]
    times = [1e3 * vars(record)[f"{part}_ms"] for part in PARTS]
    return [(part, sum(times[:at]), times[at]) for at, part in enumerate(PARTS)]


def _device(record: StepRecord) -> Iterable[tuple[str, float, float]]:
    device = record.device
    if device is None:
        return []
    if not device["kernels"]:
        title = f"{'graph' if device['is_graph'] else 'launches'}: {device['num_kernels']} kernels"
        return [(title, device["start_us"], device["us"])]
    return [(each["name"], each["start_us"], each["us"]) for each in device["kernels"]]


def _bar(
    process: int, track: int, name: str, at: float, us: float, more: dict[str, int]
) -> dict[str, Any]:
    place = {"pid": process, "tid": track, "ts": round(at, 3), "dur": round(us, 3)}
    return {"ph": "X", "name": name, **place, "args": more}


def _name(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": f"{kind}_name", "pid": process, "tid": track, "args": {"name": name}}
