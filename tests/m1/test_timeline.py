"""Pictures of traces: spans exactly, marks, KV memory, and that every kind of trace gives one."""

from __future__ import annotations

import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

import m1_single
import m2_batching
from helpers.engines import greedy, make_engine, tiny_model
from helpers.traces import row, step
from m1_single.timeline import main
from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.lab.explorer.spans import Mark, Span, request_marks, request_spans
from milestone_llm.lab.plots.block_history import kv_during_steps
from milestone_llm.lab.plots.timeline import draw_timeline, step_extents
from milestone_llm.lab.plots.timeline_panels import draw_requests
from milestone_llm.trace.records import StepRecord

Jobs = tuple[tuple[int, int], ...]
"""Tokens of each prompt and of each output."""


@functools.cache
def traced(
    package: Any, jobs: Jobs = ((6, 10), (48, 100), (20, 50)), **fields: Any
) -> list[StepRecord]:
    """The trace of an engine that serves these requests."""
    fields = {"max_model_len": 256, "max_num_seqs": 3, "trace": "memory", **fields}
    engine = make_engine(package, tiny_model(num_hidden_layers=1), **fields)
    prompts, lengths = zip(*jobs, strict=True)
    engine.generate([[5] * length for length in prompts], [greedy(length) for length in lengths])
    return list(engine.tracer.records)


def many(count: int, longest: int) -> Jobs:
    draw = random.Random(0)
    return tuple((draw.randint(8, longest), draw.randint(8, longest)) for _ in range(count))


def test_the_phases_of_each_request_are_spans() -> None:
    records = [
        step(0, [row("a", "prefill")], running=["a"], waiting=["b"]),
        step(1, [row("a")], running=["a"], waiting=["b"]),
        step(2, [row("a")], running=["a"], waiting=["b"]),
        step(3, waiting=["a", "b"]),
        step(4, [row("a", "prefill"), row("b", "prefill")], running=["a", "b"]),
        step(5, [row("b")], running=["a", "b"]),
        step(6, [row("a"), row("b", "padding")], swapped=["c"]),
        step(9, [row("a")], swapped=["c"]),
    ]
    assert request_spans(records) == [
        Span("a", "prefill", 0, 0),
        Span("a", "decode", 1, 2),
        Span("a", "preempted", 3, 3),
        Span("a", "prefill", 4, 4),
        Span("a", "waiting", 5, 5),  # it runs, and has no row
        Span("a", "decode", 6, 6),
        Span("a", "decode", 9, 9),
        Span("b", "waiting", 0, 3),
        Span("b", "prefill", 4, 4),
        Span("b", "decode", 5, 5),
        Span("b", "padding", 6, 6),
        Span("c", "swapped", 6, 6),
        Span("c", "swapped", 9, 9),
    ]


def test_marks_name_what_happened() -> None:
    records = [
        step(
            0,
            [row("b"), row("c")],
            preempted=[{"request_id": "a", "reason": "no free block for b"}],
            events=[KVEvent("copy_on_write", "b", [1, 2])],
            finished=[{"request_id": "c", "reason": "stop"}],
        ),
        step(1, resumed=["a"], finished=[{"request_id": "b", "reason": "abort"}]),
    ]
    assert request_marks(records) == [
        Mark("b", "copy_on_write", 0, has_row=True),
        Mark("a", "preempted", 0, "no free block for b"),
        Mark("c", "finished", 0, "stop", has_row=True),
        Mark("a", "resumed", 1),
        Mark("b", "finished", 1, "abort"),
    ]


def test_kv_of_a_request_counts_until_the_end_of_its_last_step() -> None:
    ended = {"finished": [{"request_id": "a", "reason": "stop"}]}
    rows = [row("a", start=39, blocks=[0, 1, 2]), row("b", start=19, blocks=[0, 3])]
    records = [
        step(0, rows, kv=KVUsage("block", 8, 4, 4, 64, 44, cached=1)),
        step(1, rows, kv=KVUsage("block", 8, 2, 4, 32, 20, cached=3), **ended),
        step(2, rows[1:], kv=KVUsage("block", 8, 2, 4, 32, 20, cached=2)),
    ]
    # Block 0 is shared: a gives back 1 and 2, which hold 24 tokens.
    assert kv_during_steps(records) == [(44, 20, 16), (44, 20, 16), (20, 12, 32)]
    static = traced(m1_single)
    assert static[-1].kv.reserved_tokens == 0
    assert kv_during_steps(static)[-1] == (48 + 99, 2 * (48 + 99), 0)


SCENES = {
    "many": lambda: [traced(m2_batching, many(80, 10), max_num_seqs=80)],
    "no mathematics": lambda: [[step(0, [row(r"$\frac$")])]],
}


@pytest.mark.parametrize("scene", SCENES)
def test_what_no_demo_has_gives_a_picture_too(scene: str, tmp_path: Path) -> None:
    traces = SCENES[scene]()
    labels = [r"$\frac$" for _ in traces]
    for by in ("step",) if scene == "many" else ("step", "positions", "time"):
        written = draw_timeline(traces, labels, tmp_path / "new" / f"{by}.png", by)
        assert written.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_a_row_shows_the_tokens_of_each_chunk_and_which_guesses_were_wrong() -> None:
    records = [
        step(0, [row("r0", "prefill", 0, 37), row("r1", "prefill")]),
        step(1, [row("r0", "prefill", 37, 4)]),
        step(2, [row("r0", num_draft_tokens=3, num_accepted_tokens=1)]),
    ]
    axes = Figure().subplots()
    draw_requests(axes, records, step_extents(records, "step"), ["r0", "r1"])
    assert [text.get_text() for text in axes.texts] == ["37", "4"]  # r1's prompt is in one piece
    bars = {bars.get_label(): [bar.get_bbox().bounds for bar in bars] for bars in axes.containers}
    assert bars["wrong guesses (waste)"] == [pytest.approx((1.5, -0.4, 1, 0.4))]
    assert bars["right guesses"] == [pytest.approx((1.5, 0, 1, 0.2))]


def test_a_step_is_as_wide_as_what_it_computed() -> None:
    records = [step(0, [row("r0", "prefill", 0, 37), row("r1")]), step(1, [row("r0")])]
    assert step_extents(records, "positions") == {0: (0, 38), 1: (38, 39)}


def test_the_command_draws_several_files_and_the_same_picture_each_time(
    tmp_path: Path, capsys: Any
) -> None:
    files = []
    for package in (m1_single, m2_batching):
        files.append(str(tmp_path / f"{package.__name__}.jsonl"))
        lines = [json.dumps(one.to_dict()) + "\n" for one in traced(package)]
        Path(files[-1]).write_text("".join(lines))
    pictures = [tmp_path / "a.svg", tmp_path / "b.svg"]
    for picture in pictures:
        assert main([*files, "-o", str(picture), "--labels", "static,continuous"]) == 0
    assert pictures[0].read_text() == pictures[1].read_text()
    for options, message in (
        (["-o", str(tmp_path / "picture.gif")], "written as .png or .svg"),
        (["--labels", "a"], "but 1 labels"),
    ):
        assert main([*files, *options]) == 2
        assert message in capsys.readouterr().err
