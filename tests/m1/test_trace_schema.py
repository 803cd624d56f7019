"""The trace: one schema for all milestones, complete, consistent, and the same read back."""

from __future__ import annotations

import json
from typing import Any

import pytest

import m1_single
import m4_prefix_chunked
from helpers.engines import (
    every_milestone,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
    run_to_end,
)
from helpers.schedulers import of_length
from milestone_llm.core.errors import InputError
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import ScheduledRequest
from milestone_llm.trace.jsonl import read_run
from milestone_llm.trace.records import BatchRow, StepRecord

LINE = """{
    "step": 12, "milestone": "m4_prefix_chunked",
    "schedule_ms": 1.0, "execute_ms": 2.0, "update_ms": 0.5,
    "batch": [
        {"request_id": "r1", "phase": "prefill", "start": 0, "num_new_tokens": 4,
         "num_cached_tokens": 0, "sampled_token": null, "blocks": [3]}
    ],
    "num_prefill_tokens": 4, "num_decode_tokens": 0, "num_padding_tokens": 0, "start_s": 0.0,
    "waiting": [], "running": ["r1"], "swapped": [], "waiting_reasons": {"r2": "no block is free"},
    "arrived": ["r1"], "admitted": ["r1"], "resumed": ["r1"],
    "preempted": [{"request_id": "r1", "reason": "no free block for r2"}],
    "finished": [{"request_id": "r0", "reason": "stop"}],
    "kv": {"unit": "block", "total": 64, "used": 40, "watermark": 51, "reserved_tokens": 640,
           "stored_tokens": 598, "cached": 10, "free": 24},
    "events": [{"type": "alloc", "request_id": "r1", "blocks": [9]},
               {"type": "evict", "request_id": null, "blocks": [4]},
               {"type": "free", "request_id": "r1", "blocks": [5, 6], "held": [5]}],
    "policy": "fcfs", "prompts": {"r1": {"priority": 0.0, "num_tokens": 4, "hashes": []}},
    "expert_load": {"num_experts": 128, "num_met": 49.0, "largest_share": 0.0469}
}"""
"""All that a line may have, in its order: readers of traces rely on it."""

PHASES = {"prefill", "decode", "padding"}
PROMPTS = random_prompts([5, 9, 2, 7])
LENGTHS = [3, 6, 1, 4]


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


def test_a_line_has_these_fields_in_this_order():
    record = StepRecord.from_json(LINE)
    assert json.dumps(record.to_dict()) == json.dumps(json.loads(LINE))


def test_a_padding_row_has_no_token_though_its_request_has_one():
    padding = ScheduledRequest(of_length("r1", 4), 4, 1, is_padding=True)
    assert BatchRow.of(padding, {"r1": [SampledToken(7)]}).sampled_token is None


@every_milestone
def test_a_trace_agrees_with_itself_and_with_the_tokens(package):
    """Four requests on two places; one more is aborted while it waits."""
    engine = make_engine(package, max_num_seqs=2, max_model_len=32, trace="memory")
    for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        engine.add_request(prompt, greedy(length), request_id=f"q{number}")
    engine.step()
    engine.add_request([5], greedy(), request_id="aborted")
    engine.abort("aborted")
    run_to_end(engine)

    finished: dict[str, str] = {}
    rows: dict[str, list[BatchRow]] = {}
    for record in engine.tracer.records:
        by_phase = {phase: [r for r in record.batch if r.phase == phase] for phase in PHASES}
        assert record.num_prefill_tokens == sum(r.num_new_tokens for r in by_phase["prefill"])
        assert record.num_decode_tokens == len(by_phase["decode"])
        assert record.num_padding_tokens >= len(by_phase["padding"])
        for each in by_phase["prefill"] + by_phase["decode"]:
            rows.setdefault(each.request_id, []).append(each)
        finished |= {ended["request_id"]: ended["reason"] for ended in record.finished}
        assert not {*record.waiting} & {*record.running}
        assert not {*record.waiting, *record.running} & {*finished}
        assert {*record.admitted} <= {*record.running, *finished}
        kv = record.kv
        assert kv.free + kv.used == kv.total
        assert kv.used <= kv.watermark
        assert 0 <= kv.stored_tokens <= kv.reserved_tokens
        assert (kv.used > 0) == bool(record.running)
    assert finished == {"aborted": "abort"} | dict.fromkeys(["q0", "q1", "q2", "q3"], "length")
    for number, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        own = rows[f"q{number}"]
        sampled = [row.sampled_token for row in own if row.sampled_token is not None]
        assert sampled == hf_greedy("llama", prompt, length)
        assert [row.start for row in own] == [0, *(row.end for row in own[:-1])]
        assert own[-1].end == len(prompt) + length - 1


@every_milestone
@pytest.mark.parametrize("name", ["steps.jsonl", "steps.jsonl.gz"])
def test_a_trace_reads_back_as_it_was_after_every_step(package, name, tmp_path):
    path = tmp_path / "deep" / name
    engine = make_engine(package, trace=str(path))
    for number, prompt in enumerate(PROMPTS):
        engine.add_request(prompt, greedy(1 + 2 * number))
    while engine.has_unfinished_requests():
        engine.step()
        if engine.tracer.records:  # M5's first step is settled with the second
            assert read_run(path) == engine.tracer.records


def test_llm_trace_prints_the_steps_of_any_program(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("LLM_TRACE", "1")
    for option in (None, "memory", "console", str(tmp_path / "steps.jsonl")):
        make_engine(m1_single, trace=option).generate([5, 6], greedy(2))
        assert capsys.readouterr().out.count("── step 0 ") == 1
    for value in ("", "0"):
        monkeypatch.setenv("LLM_TRACE", value)
        assert make_engine(m1_single).tracer is None
    monkeypatch.setenv("LLM_TRACE", "yes")
    with pytest.raises(InputError, match="LLM_TRACE"):
        make_engine(m1_single)


def test_every_sink_sees_every_record_and_one_that_fails_no_more():
    seen: list[list[Any]] = [[], [], []]

    def full_disk(record: Any) -> None:
        seen[2].append(record)
        raise OSError("no space left")

    engine = make_engine(m1_single, trace="memory")
    engine.tracer.sinks = [seen[0].append, full_disk, seen[1].append]
    with pytest.warns(RuntimeWarning, match="no space left"):
        engine.generate([5, 6], greedy(2))
    assert [len(each) for each in seen] == [2, 2, 1]


def test_two_runs_of_one_step_in_a_file_are_two_runs(tmp_path):
    path = tmp_path / "steps.jsonl"
    path.write_text(2 * (json.dumps(json.loads(LINE)) + "\n"), encoding="utf-8")
    with pytest.raises(InputError, match="several runs"):
        read_run(path)
