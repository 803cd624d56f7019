"""The trace: one schema for all milestones, complete, consistent, and the same read back."""

from __future__ import annotations

import json
import types
from typing import Any

import pytest

import m1_single
import m4_prefix_chunked
from engine_helpers import (
    every_milestone,
    greedy,
    hf_greedy,
    make_engine,
    make_request,
    random_prompts,
    run_to_end,
)
from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import Preemption, ScheduledRequest, StepPlan
from milestone_llm.core.request_queue import RequestQueue
from milestone_llm.frontend.watching import SettledStep
from milestone_llm.trace.jsonl import read_run
from milestone_llm.trace.records import BatchRow, StepRecord
from milestone_llm.trace.tracer import Tracer

SCHEMA: dict[str, Any] = {
    "step": int,
    "milestone": str,
    "schedule_ms": float,
    "execute_ms": float,
    "update_ms": float,
    "batch": [
        {
            "request_id": str,
            "phase": str,
            "start": int,
            "num_new_tokens": int,
            "num_cached_tokens": int,
            "sampled_token": int | None,
            "blocks": [int],
        }
    ],
    "num_prefill_tokens": int,
    "num_decode_tokens": int,
    "num_padding_tokens": int,
    "start_s": float,
    "waiting": [str],
    "running": [str],
    "swapped": [str],
    "waiting_reasons": dict,
    "arrived": [str],
    "admitted": [str],
    "resumed": [str],
    "preempted": [{"request_id": str, "reason": str}],
    "finished": [{"request_id": str, "reason": str}],
    "kv": {
        "unit": str,
        "total": int,
        "used": int,
        "free": int,
        "cached": int,
        "watermark": int,
        "reserved_tokens": int,
        "stored_tokens": int,
    },
    "events": [{"type": str, "request_id": str | None, "blocks": [int]}],
    "policy": str,
    "prompts": dict,
}
"""Names, order and types of a JSON line."""

PHASES = {"prefill", "decode", "padding"}
EVENTS = {"alloc", "free", "share", "copy_on_write", "evict", "swap_out", "swap_in"}
PROMPTS = random_prompts([5, 9, 2, 7])
LENGTHS = [3, 6, 1, 4]


def assert_fits(value: Any, schema: Any, where: str = "record") -> None:
    if isinstance(schema, dict):
        assert list(value) == list(schema), where
        for name, inner in schema.items():
            assert_fits(value[name], inner, f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for inner in value:
            assert_fits(inner, schema[0], f"{where}[]")
    else:
        assert isinstance(value, schema), f"{where} is {value!r}"
        assert not isinstance(value, bool), where


def traced_run(package: Any, trace: str = "memory") -> Any:
    """Four requests on two places; one is aborted while it waits."""
    engine = make_engine(package, max_num_seqs=2, max_model_len=32, trace=trace)
    for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        engine.add_request(prompt, greedy(length), request_id=f"q{number}")
    engine.step()
    engine.add_request([5], greedy(), request_id="aborted")
    engine.abort("aborted")
    run_to_end(engine)
    return engine


@every_milestone
def test_every_record_has_exactly_the_fields_of_the_schema(package):
    records = traced_run(package).tracer.records
    for number, record in enumerate(records):
        line = json.loads(json.dumps(record.to_dict()))
        assert_fits(line, SCHEMA)
        assert line["step"] == number
        assert line["milestone"] == package.__name__
        assert {row["phase"] for row in line["batch"]} <= PHASES
        assert {event["type"] for event in line["events"]} <= EVENTS


def test_a_record_says_what_a_request_came_with_and_who_begins_alike():
    engine = make_engine(m4_prefix_chunked, block_size=4, policy="priority", trace="memory")
    shared, one, other = (random_prompts([size], seed=size)[0] for size in (8, 3, 5))
    engine.add_request(shared + one, greedy(2), request_id="a", priority=2)
    engine.add_request(shared + other, greedy(2), request_id="b", priority=-1)
    salted = greedy(2, cache_salt="mine")
    engine.step()
    engine.add_request(shared, salted, request_id="c")
    run_to_end(engine)
    first, second = engine.tracer.records[:2]
    assert first.policy == "priority"
    assert {name: each["priority"] for name, each in first.prompts.items()} == {"a": 2, "b": -1}
    assert [each["num_tokens"] for each in first.prompts.values()] == [11, 13]
    a, b, c = (each["hashes"] for each in (*first.prompts.values(), second.prompts["c"]))
    assert (len(a), len(b), len(c)) == (2, 3, 2)
    assert a == b[:2]
    assert not {*a} & {*c}


def a_step_of_everything() -> tuple[Any, Any]:
    """What M1 and M2 never do, and the queues after it."""
    request = make_request("r1")
    row = ScheduledRequest(request, 0, 4, blocks=[3], num_cached_tokens=0)
    plan = StepPlan([row], [request], [request], [Preemption(request, "no free block for r2")])
    events = [KVEvent("alloc", "r1", [9]), KVEvent("evict", None, [4])]
    times = [0.0, 0.001, 0.003, 0.0035]
    step = SettledStep(12, "m4_prefix_chunked", times, plan, {}, [("r0", "stop")], events, [])
    usage = KVUsage("block", 64, 40, 51, 640, 598, cached=10)
    return step, types.SimpleNamespace(
        waiting=RequestQueue(), running=[request], kv_usage=lambda: usage
    )


def test_a_record_of_everything_fits_the_schema_too():
    data = StepRecord.of(*a_step_of_everything()).to_dict()
    assert_fits(data, SCHEMA)
    assert (data["schedule_ms"], data["execute_ms"], data["update_ms"]) == (1.0, 2.0, 0.5)
    assert data["finished"] == [{"request_id": "r0", "reason": "stop"}]
    assert data["kv"]["free"] == 24


def test_a_row_without_a_token_says_so():
    """No token amid a prompt, none where the logits held a NaN, and none of a padding row."""
    request = make_request("r1")
    row = ScheduledRequest(request, 0, 4)
    sampled = [{}, {"r1": [SampledToken(-1)]}, {"r1": [SampledToken(0)]}]
    assert [BatchRow.of(row, each).sampled_token for each in sampled] == [None, None, 0]
    padding = ScheduledRequest(request, 4, 1, is_padding=True)
    assert BatchRow.of(padding, {"r1": [SampledToken(7)]}).sampled_token is None


@every_milestone
def test_counts_rows_and_queues_of_a_record_agree(package):
    engine = traced_run(package)
    finished: list[str] = []
    for record in engine.tracer.records:
        by_phase = {phase: [r for r in record.batch if r.phase == phase] for phase in PHASES}
        assert record.num_prefill_tokens == sum(r.num_new_tokens for r in by_phase["prefill"])
        assert record.num_decode_tokens == len(by_phase["decode"])
        assert record.num_padding_tokens >= len(by_phase["padding"])
        finished += [ended["request_id"] for ended in record.finished]
        assert not {*record.waiting} & {*record.running}
        assert not {*record.waiting, *record.running} & {*finished}
        assert {*record.admitted} <= {*record.running, *finished}
        kv = record.kv
        assert kv.free + kv.used == kv.total
        assert kv.used <= kv.watermark
        assert 0 <= kv.stored_tokens <= kv.reserved_tokens
        assert (kv.used > 0) == bool(record.running)
    assert sorted(finished) == ["aborted", "q0", "q1", "q2", "q3"]
    reasons = {e["request_id"]: e["reason"] for r in engine.tracer.records for e in r.finished}
    assert reasons == {"aborted": "abort"} | dict.fromkeys(["q0", "q1", "q2", "q3"], "length")


@every_milestone
def test_the_rows_of_a_request_tell_all_its_tokens(package):
    records = traced_run(package).tracer.records
    for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        rows = [
            row
            for record in records
            for row in record.batch
            if row.request_id == f"q{number}" and row.phase != "padding"
        ]
        sampled = [row.sampled_token for row in rows if row.sampled_token is not None]
        assert sampled == hf_greedy("llama", prompt, length)
        ends = [row.start + row.num_new_tokens for row in rows]
        assert [row.start for row in rows] == [0, *ends[:-1]], "each starts where the last ended"
        assert ends[-1] == len(prompt) + length - 1


@every_milestone
def test_a_jsonl_trace_reads_back_as_it_was(package, tmp_path):
    path = tmp_path / "deep" / "steps.jsonl"
    engine = traced_run(package, str(path))
    assert read_run(path) == engine.tracer.records
    assert len(path.read_text().splitlines()) == engine.stats()["steps"]


def test_a_step_is_on_disk_when_it_returns(tmp_path):
    path = tmp_path / "steps.jsonl"
    engine = make_engine(m1_single, trace=str(path))
    engine.add_request([5, 6], greedy(3))
    for number in (1, 2):
        engine.step()
        assert len(read_run(path)) == number


@pytest.mark.parametrize("line", ["{", "[]", '{"step": 1}', "null"])
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "steps.jsonl"
    good = StepRecord.of(*a_step_of_everything()).to_dict()
    path.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        read_run(path)


def test_llm_trace_in_the_environment_prints_every_step(monkeypatch, capsys):
    monkeypatch.setenv("LLM_TRACE", "1")
    engine = make_engine(m1_single)
    engine.generate([5, 6], greedy(2))
    printed = capsys.readouterr().out
    assert len(engine.tracer.records) == 2
    assert "prefill" in printed
    assert "decode" in printed


@pytest.mark.parametrize("value", ["", "0"])
def test_without_it_nothing_is_traced(monkeypatch, capsys, value):
    monkeypatch.setenv("LLM_TRACE", value)
    engine = make_engine(m1_single)
    engine.generate([5, 6], greedy(2))
    assert engine.tracer is None
    assert capsys.readouterr().out == ""


def test_it_prints_the_steps_of_programs_that_trace_for_themselves(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LLM_TRACE", "1")
    for option in ("memory", "console", str(tmp_path / "steps.jsonl")):
        make_engine(m1_single, trace=option).generate([5, 6], greedy(2))
        assert capsys.readouterr().out.count("── step 0 ") == 1
    assert len(read_run(tmp_path / "steps.jsonl")) == 2


def test_other_values_of_the_variable_are_refused(monkeypatch):
    monkeypatch.setenv("LLM_TRACE", "yes")
    with pytest.raises(ValueError, match=r"LLM_TRACE must be 1 .* or 0, got 'yes'"):
        make_engine(m1_single)


def test_every_sink_sees_every_record_and_one_that_fails_no_more():
    seen: list[list[Any]] = [[], []]

    def full_disk(record: Any) -> None:
        raise OSError("no space left")

    tracer = Tracer([seen[0].append, full_disk, seen[1].append])
    with pytest.warns(RuntimeWarning, match="the trace ends with step 12: no space left"):
        tracer.record(*a_step_of_everything())
    tracer.record(*a_step_of_everything())
    assert [len(each) for each in seen] == [2, 2]
    assert seen == [tracer.records] * 2
