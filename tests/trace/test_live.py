"""Records for readers that watch a running engine: bounded, and never waited for."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

import m3_paged
from helpers.engines import greedy, make_engine, random_prompts
from milestone_llm.lab.explorer.live import LiveTrace


@pytest.fixture(scope="module")
def records():
    engine = make_engine(m3_paged, max_num_seqs=2, trace="memory")
    engine.generate(random_prompts([4, 6, 3]), greedy(12))
    return engine.tracer.records


def read(lines: list[str]) -> tuple[list[dict[str, Any]], int]:
    """Whole records, and how many were dropped according to the lines."""
    tables: dict[str, list[int]] = {}
    records, num_dropped = [], 0
    for line in lines:
        data = json.loads(line)
        num_dropped = data.get("num_dropped", num_dropped)
        for row in data.get("batch", []):
            if "new_blocks" in row:
                row["blocks"] = tables[row["request_id"]] + row.pop("new_blocks")
            tables[row["request_id"]] = row["blocks"]
        if "step" in data:
            for name in ("step_events", "useful", "computed"):
                del data[name]
            records.append(data)
    return records, num_dropped


def drain(reader: Any) -> list[str]:
    lines = []
    while (line := reader.get(timeout=0)) is not None:
        lines.append(line)
    return lines


def test_a_slow_reader_misses_the_oldest_and_a_new_one_begins_with_the_latest(records):
    live = LiveTrace(max_records=4)
    slow, quick = live.subscribe(), live.subscribe()
    lines = []
    for record in records[:10]:
        live(record)
        lines += drain(quick)
    latest = [record.to_dict() for record in records[6:10]]
    assert read(lines) == ([record.to_dict() for record in records[:10]], 0)
    assert read(drain(slow)) == (latest, 6)
    assert read(drain(live.subscribe())) == (latest, 0)
    live(records[10])
    assert len(drain(slow)) == 1, "what was told once is not told again"


def test_threads_read_while_the_engine_runs():
    live = LiveTrace(max_records=10_000)
    engine = make_engine(m3_paged, trace="memory")
    engine.tracer.sinks.append(live)
    readers = [live.subscribe() for _ in range(3)]
    lines: list[list[str]] = [[] for _ in readers]
    threads = [
        threading.Thread(target=lambda i=i, r=r: lines[i].extend(iter(r.get, None)))
        for i, r in enumerate(readers)
    ]
    for thread in threads:
        thread.start()
    engine.generate(random_prompts([4, 6, 3]), greedy(8))
    expected = [record.to_dict() for record in engine.tracer.records]
    while any(len(each) < len(expected) for each in lines):
        threading.Event().wait(0.01)
    for reader in readers:
        reader.close()
    for thread in threads:
        thread.join()
    assert [read(each) for each in lines] == [(expected, 0)] * 3
    assert live.num_readers == 0


def test_lines_bring_the_text_of_tokens_once(records):
    live = LiveTrace(decode=lambda token_ids: f"<{token_ids[0]}>")
    reader = live.subscribe()
    for record in records:
        live(record)
    told: dict[str, str] = {}
    for line in drain(reader):
        texts = json.loads(line).get("texts", {})
        assert not told.keys() & texts.keys()
        told |= texts
    sampled = {row.sampled_token for record in records for row in record.batch} - {None}
    assert told == {str(token): f"<{token}>" for token in sampled}
