"""Chrome's trace JSON: tracks nest, times grow, what begins ends."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

import m5_kernels
from engine_helpers import every_milestone, greedy, make_engine, random_prompts, run_to_end
from milestone_llm.lab.trace import explore

Event = dict[str, Any]


def check(events: list[Event]) -> None:
    """Assert that a viewer could draw it.

    Raises:
        AssertionError: something crosses, ends that has not begun, or never ends.
    """
    times = [event["ts"] for event in events]
    assert times == sorted(times), "times go back"
    assert all(time >= 0 for time in times)
    stacks: dict[Any, list[str]] = defaultdict(list)
    for event in events:
        phase, name = event["ph"], event["name"]
        if phase in "BE":
            stack = stacks["track", event["pid"], event["tid"]]
        elif phase in "be":
            stack = stacks["request", event["pid"], event["cat"], event["id"]]
        else:
            assert phase in "CM"
            if phase == "C":
                assert all(isinstance(value, int) for value in event["args"].values())
            continue
        if phase in "Bb":
            stack.append(name)
        else:
            assert stack, f"{name} ends and never began"
            assert stack.pop() == name, "slices cross"
    assert not any(stacks.values()), "something never ends"


def traced(package: Any) -> Any:
    engine = make_engine(package, max_num_seqs=3, max_model_len=32, trace="memory")
    for number, prompt in enumerate(random_prompts([5, 9, 2, 7, 6, 3])):
        engine.add_request(prompt, greedy(3 + 2 * number), request_id=f"q{number}")
        engine.step()
    engine.abort("q4")
    run_to_end(engine)
    return engine


@every_milestone
def test_a_run_is_a_valid_trace(package, tmp_path):
    path = tmp_path / "run.json"
    records = traced(package).tracer.records
    explore.write_chrome([records, records], path)
    events = json.loads(path.read_text())["traceEvents"]
    check(events)
    begun = [event["name"] for event in events if event["ph"] == "B" and event["pid"] == 1]
    assert {f"step {record.step}" for record in records} <= set(begun)
    asynchronous = {event["name"] for event in events if event["ph"] == "b"}
    assert {"q0", "q5", "waiting", "prefill", "decode"} <= asynchronous
    counters = {event["name"] for event in events if event["ph"] == "C"}
    assert {"rows", "tokens of the step", "queue", f"KV {records[0].kv.unit}s"} == counters


def test_pipelined_steps_overlap_on_two_tracks(tmp_path):
    records = traced(m5_kernels).tracer.records
    path = tmp_path / "run.json"
    explore.write_chrome([records], path)
    events = json.loads(path.read_text())["traceEvents"]
    spans: dict[str, list[float]] = defaultdict(list)
    for event in events:
        if event["ph"] in "BE" and event["name"].startswith("step "):
            spans[event["name"]].append(event["ts"])
    pairs = [(spans[f"step {n}"], spans[f"step {n + 1}"]) for n in range(len(records) - 1)]
    assert any(later[0] < earlier[1] for earlier, later in pairs)
    assert any(event["name"].startswith("launch 3, collect 2") for event in events)


def test_the_command_writes_it(tmp_path, capsys):
    trace = tmp_path / "run.jsonl"
    make_engine(m5_kernels, trace=str(trace)).generate([5, 6, 7], greedy(4))
    target = tmp_path / "run.json"
    assert explore.main([str(trace), "--format", "chrome", "-o", str(target)]) == 0
    check(json.loads(target.read_text())["traceEvents"])


def slices(*marks: tuple[str, int, str]) -> list[Event]:
    return [{"ph": ph, "ts": ts, "name": name, "pid": 1, "tid": 1} for ph, ts, name in marks]


@pytest.mark.parametrize(
    ("marks", "message"),
    [
        ([("B", 0, "a"), ("B", 1, "b"), ("E", 2, "a"), ("E", 3, "b")], "cross"),
        ([("E", 0, "a")], "never began"),
        ([("B", 0, "a")], "never ends"),
        ([("B", 3, "a"), ("E", 2, "a")], "go back"),
    ],
)
def test_the_validator_finds_what_it_looks_for(marks, message):
    with pytest.raises(AssertionError, match=message):
        check(slices(*marks))
