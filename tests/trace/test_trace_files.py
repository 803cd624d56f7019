"""Traces as files: every line is a record, compressed ones read back, bad ones name the line."""

from __future__ import annotations

import dataclasses
import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import m3_paged
from engine_helpers import every_milestone, greedy, make_engine, random_prompts, run_to_end
from m1_single import timeline
from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.lab.plots.timeline import draw_timeline
from milestone_llm.lab.trace import explore
from milestone_llm.lab.trace.live import PageLines
from milestone_llm.trace import jsonl
from milestone_llm.trace.records import BatchRow, StepRecord
from milestone_llm.trace.tracer import Tracer


def traced(package: Any, trace: str = "memory") -> Any:
    """Requests that come, wait, share a step and go."""
    engine = make_engine(package, max_num_seqs=3, max_model_len=32, trace=trace)
    for number, prompt in enumerate(random_prompts([5, 9, 2, 7, 6, 3])):
        engine.add_request(prompt, greedy(3 + 2 * number), request_id=f"q{number}")
        engine.step()
    run_to_end(engine)
    return engine


@every_milestone
def test_plain_data_is_a_record_again(package):
    records = traced(package).tracer.records
    lines = [json.dumps(record.to_dict()) for record in records]
    assert [StepRecord.from_json(line) for line in lines] == records


def long_step(number: int, num_rows: int = 256) -> StepRecord:
    """A step of a batch of requests that have been decoding for long."""
    end = 400 + number
    rows = []
    for index in range(num_rows):
        blocks = [index * 64 + block for block in range(end // 16 + 1)]
        token = (index * 7919 + number * 104729) % 150_000
        rows.append(BatchRow(f"r{index + 1000}", "decode", end, 1, 0, token, blocks))
    names = [row.request_id for row in rows]
    events = [KVEvent("alloc", name, [number]) for name in names[:: 16 if end % 16 else 1]]
    kv = KVUsage("block", 16384, 12000, 13000, 190_000, 180_000)
    waiting = [f"r{index}" for index in range(2000 + number, 2200)]
    lists: dict[str, Any] = {"admitted": [], "resumed": [], "preempted": [], "finished": []}
    lists |= {"waiting_reasons": {}, "arrived": []}
    counts = {"num_prefill_tokens": 0, "num_decode_tokens": num_rows, "num_padding_tokens": 0}
    times = {"schedule_ms": 0.123, "execute_ms": 9.876, "update_ms": 0.543, "start_s": 12.345678}
    return StepRecord(
        step=number,
        milestone="m4_prefix_chunked",
        batch=rows,
        waiting=waiting,
        running=names,
        swapped=[],
        kv=kv,
        events=events,
        **lists,
        **counts,
        **times,
    )


def test_every_line_of_a_long_trace_is_a_whole_record(tmp_path):
    records = [long_step(number) for number in range(40)]
    for name in ("long.jsonl", "long.jsonl.gz"):
        sink = jsonl.JsonlSink(tmp_path / name)
        for record in records:
            sink(record)
    assert jsonl.read_run(tmp_path / "long.jsonl.gz") == records
    lines = (tmp_path / "long.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [record.to_dict() for record in records]


def test_the_page_of_a_thousand_steps_of_256_rows_stays_below_10_mb():
    records = [long_step(number) for number in range(100)]
    sizes = [
        len(explore.explorer_html([explore.Run("a", some)])) for some in (records[:50], records)
    ]
    assert sizes[1] + 18 * (sizes[1] - sizes[0]) < 10_000_000


def test_a_line_for_the_page_has_only_the_new_blocks_of_a_table_that_grew():
    row = BatchRow("a", "decode", 8, 1, 0, 5, [3, 9])
    first = dataclasses.replace(long_step(0, 1), batch=[row])
    second = dataclasses.replace(first, batch=[dataclasses.replace(row, blocks=[3, 9, 4])])
    other = dataclasses.replace(first, batch=[dataclasses.replace(row, blocks=[3, 8, 4])])
    page = PageLines()
    lines = [json.loads(page.line(each)) for each in (first, second, second, other)]
    tables_told = [
        (row.get("blocks"), row.get("new_blocks")) for (row,) in (a["batch"] for a in lines)
    ]
    assert tables_told == [([3, 9], None), (None, [4]), (None, []), ([3, 8, 4], None)]


def test_a_compressed_trace_reads_back_while_it_is_written(tmp_path):
    path = tmp_path / "run.jsonl.gz"
    engine = traced(m3_paged, str(path))
    assert jsonl.read_run(path) == engine.tracer.records
    assert path.read_bytes()[:2] == b"\x1f\x8b"


@pytest.fixture(scope="module")
def good() -> list[str]:
    return [json.dumps(record.to_dict()) for record in traced(m3_paged).tracer.records[:4]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda lines: [], "line 1: the file is empty"),
        (lambda lines: ["nonsense"], "line 1: not a record of an engine"),
        (lambda lines: ['{"name": "somebody else\'s"}'], "line 1: not a record of an engine"),
        (lambda lines: ['{"step": 0, "batch": [], "kv": {}}'], "line 1: not a record of an engine"),
        (lambda lines: [*lines[:2], lines[2][:40]], "line 3: not a record of an engine"),
        (lambda lines: [*lines, lines[0]], "line 5: step 0 follows step 3: the file holds several"),
    ],
)
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_a_file_that_is_no_trace_gets_a_message_with_the_line(
    spoil, message, suffix, good, tmp_path, capsys
):
    path = tmp_path / f"bad{suffix}"
    text = "".join(line + "\n" for line in spoil(good)).encode()
    path.write_bytes(gzip.compress(text) if suffix.endswith("gz") else text)
    assert explore.main([str(path), "-o", str(tmp_path / "page.html")]) == 2
    assert f"{path}, {message}" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (["start_s"], "0.5", "start_s: Input should be a valid number"),
        (["start_s"], float("nan"), "start_s: Input should be a finite number"),
        (["step"], 2.0, "step: Input should be a valid integer"),
        (["step"], True, "step: Input should be a valid integer"),
        (["batch"], {}, "batch: Input should be a valid array"),
        (["batch", 0], None, "batch.0: Input should be an object"),
        (["batch", 0, "start"], "<b>", "batch.0.start: Input should be a valid integer"),
        (["batch", 0, "start"], -1, "batch.0.start: Input should be greater than or equal to 0"),
        (["batch", 0, "phase"], "<b>", "batch.0.phase: String should match pattern"),
        (["batch", 0, "blocks"], [0, "1"], "batch.0.blocks.1: Input should be a valid integer"),
        (["batch", 0, "blocks"], [10**9], "block 1000000000 is named, but kv.total is 6"),
        (["running", 0], 7, "running.0: Input should be a valid string"),
        (["waiting_reasons"], {"\x1b[2J": 1}, "waiting_reasons.\\x1b[2J: Input should be a valid"),
        (["finished"], [{"request_id": "a"}], "finished.0.reason: Field required"),
        (["kv", "unit"], "<b>", "kv.unit is one of ('token', 'region', 'block')"),
        (["kv", "total"], "64", "kv.total: Input should be a valid integer"),
        (["kv", "stored_tokens"], -1, "a number below 0 in KVUsage("),
        (["events", 0, "type"], "<script>", "the type of an event of ('alloc', 'free', 'share'"),
        (["events", 0, "request_id"], 1, "events.0.request_id: Input should be a valid string"),
        (
            ["events", 0, "request_id"],
            "gone",
            "events.request_id: 'gone' is no request of this run",
        ),
        (["events", 0, "blocks"], [-1], "block -1 is named, but kv.total is 6"),
    ],
)
@pytest.mark.parametrize("door", [explore.main, timeline.main])
def test_a_wrong_type_is_refused_by_file_line_and_field(
    door, place, value, message, good, tmp_path, capsys
):
    line = json.loads(good[0])
    spoiled = line
    for name in place[:-1]:
        spoiled = spoiled[name]
    spoiled[place[-1]] = value
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join([good[0], json.dumps(line)]))
    assert door([str(path), "-o", str(tmp_path / "made.html")]) == 2
    told = "".join(capsys.readouterr().err.split())  # without the ends of lines
    assert "".join(f"{path}, line 2: ".split()) in told
    assert "".join(message.split()) in told


def test_nothing_of_a_trace_is_taken_for_mathematics(tmp_path):
    record = dataclasses.replace(long_step(0, 1), waiting=[r"$\frac$"], admitted=[r"$\frac$"])
    path = tmp_path / "picture.png"
    assert draw_timeline([[record]], [r"$\frac$"], path).exists()


def test_a_damaged_compressed_file_is_named_too(tmp_path, capsys):
    path = tmp_path / "bad.jsonl.gz"
    path.write_bytes(b"no gzip at all")
    assert explore.main([str(path), "-o", str(tmp_path / "page.html")]) == 2
    assert f"{path}, line 1: Not a gzipped file" in " ".join(capsys.readouterr().err.split())


def test_the_command_writes_one_file_with_everything_in_it(tmp_path, capsys):
    traces = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for path in traces:
        traced(m3_paged, str(path))
    page = tmp_path / "deep" / "page.html"
    command = [*map(str, traces), "-o", str(page), "--labels", "one,two"]
    assert explore.main(command) == 0
    assert capsys.readouterr().out == f"wrote {page}\n"
    text = page.read_text(encoding="utf-8")
    assert "<title>one (m3_paged) beside two (m3_paged)</title>" in text
    assert "src=" not in text
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")


def test_a_page_of_a_trace_needs_no_torch(tmp_path):
    path = tmp_path / "run.jsonl"
    traced(m3_paged, str(path))
    program = (
        "import sys; from milestone_llm.lab.trace import explore\n"
        f"assert explore.main([{str(path)!r}, '-o', {str(tmp_path / 'page.html')!r}]) == 0\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)


def test_the_page_takes_one_run_or_two():
    run = explore.Run("a", traced(m3_paged).tracer.records)
    for runs in ([run] * 3, [explore.Run("a", [])], []):
        with pytest.raises(ValueError, match="1 to 2 runs of some steps, or a live URL"):
            explore.explorer_html(runs)


def test_a_tracer_that_keeps_nothing_still_tells_its_sinks():
    seen: list[StepRecord] = []
    engine = make_engine(m3_paged)
    tracer = Tracer([seen.append], keeps_records=False)
    engine.step_log.watchers.append(tracer)
    engine.generate([5, 6, 7], greedy(3))
    assert tracer.records == []
    assert [record.step for record in seen] == [0, 1, 2]
    assert seen[0].start_s == 0.0
    assert 0 < seen[1].start_s < seen[2].start_s


@every_milestone
def test_who_arrived_and_why_the_first_of_the_queue_waits(package):
    engine = make_engine(package, max_num_seqs=2, max_model_len=32, trace="memory")
    for name in ("a", "b", "c", "d"):
        engine.add_request([5, 6, 7], greedy(6), request_id=name)
    for _ in range(4):
        engine.step()
    engine.add_request([5, 6, 7], greedy(2), request_id="late")
    run_to_end(engine)
    records = engine.tracer.records
    assert records[0].arrived == ["a", "b", "c", "d"]
    assert [(r.step, r.arrived) for r in records[1:] if r.arrived] == [(4, ["late"])]
    assert list(records[0].waiting_reasons) == ["c"], "d waits behind c"
    words = (
        "until its last request is done" if package.__name__ == "m1_single" else "max_num_seqs=2"
    )
    assert words in records[0].waiting_reasons["c"]
    assert records[-1].waiting_reasons == {}


def test_traces_are_listed_with_the_package():
    """Without them an installed package could not make a page."""
    folder = Path(explore.__file__).parent / "explorer"
    used = {f"{name}.js" for name in explore.SCRIPTS} | {"page.html", "style.css"}
    assert {path.name for path in folder.iterdir()} == used
