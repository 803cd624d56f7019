"""The timeline: spans exactly, marks, and that every kind of trace gives a picture."""

from __future__ import annotations

import ast
import dataclasses
import functools
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import m1_single
import m2_batching
import m3_paged
import milestone_llm.lab.trace
from engine_helpers import greedy, make_engine, tiny_model
from m1_single.timeline import main
from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.lab.plots.block_history import kv_during_steps
from milestone_llm.lab.plots.timeline import draw_timeline, step_extents
from milestone_llm.lab.plots.timeline_panels import draw_requests
from milestone_llm.lab.trace.positions import useful_share
from milestone_llm.lab.trace.spans import (
    Mark,
    Span,
    arrival_order,
    request_marks,
    request_spans,
)
from milestone_llm.trace.records import BatchRow, StepRecord

PNG_HEADER = b"\x89PNG\r\n\x1a\n"


def record(step: int, **fields: Any) -> StepRecord:
    """A record with little in it; `rows` is request id -> phase."""
    rows = fields.pop("rows", {})
    batch = [BatchRow(name, phase, 0, 1, 0, None, []) for name, phase in rows.items()]
    queues = ("waiting", "running", "swapped")
    changes = ("arrived", "admitted", "resumed", "preempted", "finished", "events")
    empty: dict[str, Any] = {name: [] for name in (*queues, *changes)}
    counts = {
        f"num_{phase}_tokens": list(rows.values()).count(phase)
        for phase in ("prefill", "decode", "padding")
    }
    kv = KVUsage("block", 8, 2, 2, 32, 20)
    times = {"schedule_ms": 0.1, "execute_ms": 8.0, "update_ms": 0.1, "start_s": 0.0}
    values = {
        "waiting_reasons": {},
        "milestone": "m1_single",
        "batch": batch,
        "kv": kv,
        **times,
        **empty,
        **counts,
    }
    return StepRecord(**{**values, "step": step, **fields})


Job = tuple[int, int]
"""Tokens of the prompt and of the output."""

CLASSIC: list[Job] = [(6, 10), (48, 100), (20, 50)]


@functools.cache
def _traced(package: Any, jobs: tuple[Job, ...], **fields: Any) -> list[StepRecord]:
    fields = {"max_model_len": 256, "max_num_seqs": 3, "trace": "memory", **fields}
    engine = make_engine(package, tiny_model(num_hidden_layers=1), **fields)
    prompts, lengths = zip(*jobs, strict=True)
    engine.generate([[5] * length for length in prompts], [greedy(length) for length in lengths])
    return list(engine.tracer.records)


def traced(package: Any, jobs: list[Job], **fields: Any) -> list[StepRecord]:
    """The trace of an engine that serves these requests."""
    return _traced(package, tuple(jobs), **fields)


def many(count: int, longest: int) -> list[Job]:
    draw = random.Random(0)
    return [(draw.randint(8, longest), draw.randint(8, longest)) for _ in range(count)]


def paged(mode: str) -> list[StepRecord]:
    """Memory for two requests of five."""
    fields = {"max_num_seqs": 6, "max_model_len": 48, "kv_cache_tokens": 96, "preemption": mode}
    records = traced(m3_paged, many(5, 24), **fields)
    assert any(record.preempted for record in records)
    return records


def test_neighbouring_steps_in_one_phase_are_one_span() -> None:
    records = [
        record(0, rows={"a": "prefill", "b": "prefill"}, waiting=["c"], running=["a", "b"]),
        record(1, rows={"a": "decode", "b": "decode"}, waiting=["c"], running=["a"]),
        record(2, rows={"a": "decode", "b": "padding"}, waiting=["c"]),
        record(3, rows={"c": "prefill"}),
    ]
    assert request_spans(records) == [
        Span("a", "prefill", 0, 0),
        Span("a", "decode", 1, 2),
        Span("b", "prefill", 0, 0),
        Span("b", "decode", 1, 1),
        Span("b", "padding", 2, 2),
        Span("c", "waiting", 0, 2),
        Span("c", "prefill", 3, 3),
    ]


def test_waiting_after_a_row_is_preempted_and_swapped_has_its_own_phase() -> None:
    records = [
        record(5, rows={"a": "prefill"}, running=["a"]),
        record(6, waiting=["a", "b"]),
        record(7, rows={"a": "prefill"}, running=["a"], waiting=["b"]),
        record(8, swapped=["a"], waiting=["b"]),
    ]
    assert request_spans(records) == [
        Span("a", "prefill", 5, 5),
        Span("a", "preempted", 6, 6),
        Span("a", "prefill", 7, 7),
        Span("a", "swapped", 8, 8),
        Span("b", "waiting", 6, 8),
    ]


def test_a_running_request_without_a_row_waits_and_a_gap_ends_a_span() -> None:
    records = [
        record(0, rows={"a": "prefill"}, running=["a"]),
        record(1, running=["a"]),
        record(2, rows={"a": "decode"}, running=["a"]),
        record(9, rows={"a": "decode"}, running=["a"]),
    ]
    assert request_spans(records) == [
        Span("a", "prefill", 0, 0),
        Span("a", "waiting", 1, 1),
        Span("a", "decode", 2, 2),
        Span("a", "decode", 9, 9),
    ]


def test_static_batching_of_the_classic_three_gives_exactly_these_spans() -> None:
    assert request_spans(traced(m1_single, CLASSIC)) == [
        Span("r0", "prefill", 0, 0),
        Span("r0", "decode", 1, 9),
        Span("r0", "padding", 10, 99),
        Span("r1", "prefill", 0, 0),
        Span("r1", "decode", 1, 99),
        Span("r2", "prefill", 0, 0),
        Span("r2", "decode", 1, 49),
        Span("r2", "padding", 50, 99),
    ]


def test_marks_name_what_happened() -> None:
    records = [
        record(
            0,
            rows={"b": "decode", "c": "decode"},
            preempted=[{"request_id": "a", "reason": "no free block for b"}],
            events=[KVEvent("copy_on_write", "b", [1, 2])],
            finished=[{"request_id": "c", "reason": "stop"}],
        ),
        record(1, resumed=["a"], finished=[{"request_id": "b", "reason": "abort"}]),
    ]
    assert request_marks(records) == [
        Mark("b", "copy_on_write", 0, has_row=True),
        Mark("a", "preempted", 0, "no free block for b"),
        Mark("c", "finished", 0, "stop", has_row=True),
        Mark("a", "resumed", 1),
        Mark("b", "finished", 1, "abort"),
    ]


def test_arrival_order_is_rows_before_queues() -> None:
    records = [record(0, rows={"b": "prefill"}, waiting=["d"]), record(1, rows={"a": "prefill"})]
    assert arrival_order(records) == ["b", "d", "a"]


def test_useful_share_counts_positions() -> None:
    static, continuous = traced(m1_single, CLASSIC), traced(m2_batching, CLASSIC)
    useful = 6 + 48 + 20 + 9 + 99 + 49  # prompts, then one position per output but the first
    assert useful_share(static) == pytest.approx(useful / (3 * 48 + 3 * 99))
    assert useful_share(continuous) == 1
    assert useful_share([record(0)]) == 1


def batch_row(name: str, end: int, blocks: list[int]) -> BatchRow:
    return BatchRow(name, "decode", end - 1, 1, 0, None, blocks)


def test_kv_of_a_request_counts_until_the_end_of_its_last_step() -> None:
    ended = {"finished": [{"request_id": "a", "reason": "stop"}]}
    rows = [batch_row("a", 40, [0, 1, 2]), batch_row("b", 20, [0, 3])]
    records = [
        record(0, batch=rows, kv=KVUsage("block", 8, 4, 4, 64, 44, cached=1)),
        record(1, batch=rows, kv=KVUsage("block", 8, 2, 4, 32, 20, cached=3), **ended),
        record(2, batch=rows[1:], kv=KVUsage("block", 8, 2, 4, 32, 20, cached=2)),
    ]
    # Block 0 is shared: a gives back 1 and 2, which hold 24 tokens.
    assert kv_during_steps(records) == [(44, 20, 16), (44, 20, 16), (20, 12, 32)]
    before = record(0, batch=[], kv=KVUsage("region", 4, 1, 1, 64, 8))
    empty = KVUsage("region", 4, 0, 1, 0, 0)
    after = record(1, batch=[batch_row("a", 9, [2])], kv=empty, **ended)
    assert kv_during_steps([before, after])[1] == (9, 55, 0)


def test_kv_of_a_static_batch_counts_until_its_last_step() -> None:
    records = traced(m1_single, CLASSIC)
    assert records[-1].kv.reserved_tokens == 0
    assert kv_during_steps(records)[-1] == (48 + 99, 2 * (48 + 99), 0)


def test_the_capacity_is_in_the_legend_and_in_every_panel(tmp_path: Path) -> None:
    traces = [traced(m2_batching, CLASSIC[:n]) for n in (1, 3)]
    text = draw_timeline(traces, ["one", "three"], tmp_path / "map.svg").read_text()
    assert text.count("<!-- KV capacity -->") == 1
    assert text.count("stroke-dasharray: 4,2") == 3


def test_steps_by_time_follow_one_another() -> None:
    records = [record(3), record(4, execute_ms=16.0)]
    assert step_extents(records, "step") == {3: (2.5, 3.5), 4: (3.5, 4.5)}
    by_time = step_extents(records, "time")
    assert by_time[3] == pytest.approx((0, 0.0082))
    assert by_time[4] == pytest.approx((0.0082, 0.0244))


SCENES = {
    "static": lambda: [traced(m1_single, CLASSIC)],
    "paged": lambda: [paged("recompute"), paged("swap")],
    "many": lambda: [traced(m2_batching, many(80, 10), max_num_seqs=80)],
}


@pytest.mark.parametrize("scene", SCENES)
def test_every_kind_of_trace_gives_a_picture(scene: str, tmp_path: Path) -> None:
    traces = SCENES[scene]()
    labels = [trace[0].milestone for trace in traces]
    written = draw_timeline(traces, labels, tmp_path / "new" / "picture.png")
    assert written.read_bytes().startswith(PNG_HEADER)


def test_no_tick_stands_between_two_steps_however_few_there_are(tmp_path: Path) -> None:
    trace = [record(0, rows={"r0": "prefill"})]
    text = draw_timeline([trace], ["m1"], tmp_path / "one.svg").read_text()
    assert "<!-- 0 -->" in text
    assert not re.search(r"<!-- \S?0\.", text)


def test_chunks_of_a_prompt_are_told_apart_and_say_how_many_tokens_they_have() -> None:
    records = [
        record(0, rows={"r0": "prefill", "r1": "prefill"}),
        record(1, rows={"r0": "prefill"}),
    ]
    for step, num_tokens in enumerate((37, 4)):
        row = records[step].batch[0]
        records[step].batch[0] = dataclasses.replace(row, num_new_tokens=num_tokens)
    axes = Figure().subplots()
    draw_requests(axes, records, step_extents(records, "step"), ["r0", "r1"])
    assert [text.get_text() for text in axes.texts] == ["37", "4"]  # r1's prompt is in one piece
    gaps = [line for one in axes.collections for line in one.get_segments()]
    assert [gap[0][0] for gap in gaps] == [0.5, 1.5]


def test_guesses_have_their_share_of_a_row_and_wrong_ones_are_waste() -> None:
    records = [record(0, rows={"r0": "decode"}), record(1, rows={"r0": "padding"})]
    for one in records:  # of a request that has ended, a row is waste as a whole
        (row,) = one.batch
        one.batch[0] = dataclasses.replace(row, num_draft_tokens=3, num_accepted_tokens=1)
    axes = Figure().subplots()
    draw_requests(axes, records, step_extents(records, "step"), ["r0"])
    bars = {bars.get_label(): [bar.get_bbox().bounds for bar in bars] for bars in axes.containers}
    assert bars["wrong guesses (waste)"] == [pytest.approx((-0.5, -0.4, 1, 0.4))]
    assert bars["right guesses"] == [pytest.approx((-0.5, 0, 1, 0.2))]


def test_the_same_trace_gives_the_same_svg(tmp_path: Path) -> None:
    trace = traced(m2_batching, CLASSIC)
    pictures = [
        draw_timeline([trace], ["m2"], tmp_path / name, by="time").read_text()
        for name in ("a.svg", "b.svg")
    ]
    assert pictures[0] == pictures[1]
    assert pictures[0].lstrip().startswith("<?xml")


def write(path: Path, records: list[StepRecord]) -> str:
    path.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in records))
    return str(path)


def test_the_command_draws_several_files(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    files = [
        write(tmp_path / f"{package.__name__}.jsonl", traced(package, CLASSIC))
        for package in (m1_single, m2_batching)
    ]
    output = tmp_path / "both.png"
    assert main([*files, "-o", str(output), "--labels", "static,continuous"]) == 0
    assert output.exists()
    assert capsys.readouterr().out == f"wrote {output}\n"


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        (None, [], "No such file"),
        ("", [], "the trace has no steps"),
        ("not json\n", [], "line 1: not a record of an engine"),
        (
            '{"step": 0, "batch": [], "kv": {}}\n',
            [],
            "line 1: not a record of an engine's step: milestone: Field required",
        ),
        ("good", ["-o", "picture.gif"], "written as .png or .svg"),
        ("good", ["--labels", "a,b"], "1 traces, but 2 labels"),
        ("twice", [], "several runs"),
    ],
)
def test_bad_input_ends_with_code_2_and_a_reason(
    content: str | None,
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "trace.jsonl"
    if content in ("good", "twice"):
        write(path, [record(0)] * (2 if content == "twice" else 1))
    elif content is not None:
        path.write_text(content)
    assert main([str(path), *options]) == 2
    assert message in capsys.readouterr().err


def test_the_trace_imports_no_picture_and_no_matplotlib() -> None:
    for path in Path(milestone_llm.lab.trace.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert not re.search(r"matplotlib|\bplots\b", str(name)), f"{path} imports {name}"
