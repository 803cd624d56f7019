"""A trace for Perfetto has each step's host, kernels and rows at their times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milestone_llm.lab.explorer.__main__ import main
from milestone_llm.lab.playground.service import Playground, presets
from milestone_llm.trace.jsonl import read_run

TRACE = Path(__file__).parents[2] / "docs/traces/m5_h200_launched.jsonl.gz"


def exported(trace, tmp_path):
    """Events by process, track and name, and names of tracks, as the program writes them."""
    assert main([str(trace), "-o", str(tmp_path / "run.json")]) == 0
    events = json.loads((tmp_path / "run.json").read_text("utf-8"))["traceEvents"]
    names = {each["tid"]: each["args"]["name"] for each in events if each["name"] == "thread_name"}
    bars = [{**each, "track": names[each["tid"]]} for each in events if each["ph"] == "X"]
    return bars, list(names.values())


def test_a_profiled_run_has_its_kernels_at_the_times_of_the_device(tmp_path):
    bars, tracks = exported(TRACE, tmp_path)
    assert tracks[:3] == ["host", "device", "r0"]
    records = read_run(TRACE)
    for record in records[1:3]:  # with its kernels one by one, and without
        own = [each for each in bars if each["args"]["step"] == record.step]
        kernels = [each for each in own if each["track"] == "device"]
        assert len(kernels) == (len(record.device["kernels"]) or 1)
        first = record.start_s * 1e6 + record.device["start_us"]
        assert kernels[0]["ts"] == pytest.approx(first, abs=0.01)
        end = kernels[-1]["ts"] + kernels[-1]["dur"]
        assert end == pytest.approx(first + record.device["us"], abs=0.2)
        host = [each["name"] for each in own if each["track"] == "host"]
        assert host == ["plan", "launch", "wait", "settle"]
        rows = {each["track"]: each["name"] for each in own if each["track"][0] == "r"}
        assert rows == {row.request_id: row.phase for row in record.batch}


def test_a_run_without_a_profiler_has_the_hosts_three_parts(tmp_path):
    trace = tmp_path / "run.jsonl"
    trace.write_text(Playground().trace(presets()[0]), "utf-8")
    bars, tracks = exported(trace, tmp_path)
    assert "device" not in tracks
    record = read_run(trace)[1]
    host = [each for each in bars if each["track"] == "host" and each["args"]["step"] == 1]
    assert [each["name"] for each in host] == ["schedule", "execute", "update"]
    assert sum(each["dur"] for each in host) == pytest.approx(1e3 * record.execute_ms)
    assert host[0]["ts"] == pytest.approx(record.start_s * 1e6)
