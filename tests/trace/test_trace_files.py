"""Traces as files and as pages: what cannot be read is refused with the line, a page is whole."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import m3_paged
from helpers.engines import every_milestone, greedy, make_engine, random_prompts, run_to_end
from helpers.traces import row, step
from milestone_llm.core.kv import KVUsage
from milestone_llm.lab.explorer import __main__ as explore
from milestone_llm.lab.explorer.live import PageLines


def traced(package: Any, trace: str = "memory") -> Any:
    """Requests that come, wait, share a step and go."""
    engine = make_engine(package, max_num_seqs=3, max_model_len=32, trace=trace)
    for number, prompt in enumerate(random_prompts([5, 9, 2, 7, 6, 3])):
        engine.add_request(prompt, greedy(3 + 2 * number), request_id=f"q{number}")
        engine.step()
    run_to_end(engine)
    return engine


def test_a_line_for_the_page_has_only_the_new_blocks_of_a_table_that_grew():
    tables = ([3, 9], [3, 9, 4], [3, 9, 4], [3, 8, 4])
    kv, page = KVUsage("block", 64, 3, 3, 48, 40), PageLines()
    lines = [
        json.loads(page.line(step(number, [row("a", start=8, blocks=table)], kv=kv)))
        for number, table in enumerate(tables)
    ]
    tables_told = [
        (row.get("blocks"), row.get("new_blocks")) for (row,) in (a["batch"] for a in lines)
    ]
    assert tables_told == [([3, 9], None), (None, [4]), (None, []), ([3, 8, 4], None)]


@pytest.fixture(scope="module")
def good() -> list[str]:
    return [json.dumps(record.to_dict()) for record in traced(m3_paged).tracer.records[:4]]


def file_of(lines: list[str]) -> bytes:
    return "".join(line + "\n" for line in lines).encode()


def refusal(content: bytes, path: Path, capsys: Any) -> str:
    """What the page's command says of such a file, on one line."""
    path.write_bytes(content)
    page = path.with_name("page.html")
    assert explore.main([str(path), "-o", str(page)]) == 2
    assert not page.exists()
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("spoil", "suffix", "message"),
    [
        (lambda lines: b"", "jsonl", "line 1: the file is empty"),
        (lambda lines: file_of([*lines, lines[0]]), "jsonl", "line 5: step 0 follows step 3"),
        (lambda lines: gzip.compress(file_of(lines)[:-40]), "jsonl.gz", "line 4: not a record"),
        (lambda lines: b"no gzip at all", "jsonl.gz", "line 1: Not a gzipped file"),
    ],
)
def test_a_file_that_is_no_trace_gets_a_message_with_the_line(
    spoil, suffix, message, good, tmp_path, capsys
):
    path = tmp_path / f"bad.{suffix}"
    assert f"{path}, {message}" in refusal(spoil(good), path, capsys)


@pytest.mark.parametrize(
    ("place", "value", "where"),
    [
        (["start_s"], float("nan"), "start_s"),
        (["batch", 0, "blocks"], [10**9], "block 1000000000 is named, but kv.total is 6"),
        (["waiting_reasons"], {"\x1b[2J": 1}, "waiting_reasons.\\x1b[2J"),
        (["kv", "unit"], "<b>", "kv.unit"),
        (["kv", "stored_tokens"], -1, "a number below 0"),
        (["events", 0, "request_id"], "gone", "events.request_id"),
    ],
)
def test_a_field_that_no_engine_writes_is_refused_by_line_and_name(
    place, value, where, good, tmp_path, capsys
):
    line = json.loads(good[1])
    spoiled = line
    for name in place[:-1]:
        spoiled = spoiled[name]
    spoiled[place[-1]] = value
    told = refusal(file_of([good[0], json.dumps(line)]), tmp_path / "bad.jsonl", capsys)
    assert "line 2: " in told
    assert where in told


def test_a_page_that_is_not_there_or_no_page_is_named(tmp_path, capsys):
    path, command = tmp_path / "old.html", [str(tmp_path / "old.html"), "-o", str(tmp_path / "new")]
    assert explore.main(command) == 2
    path.write_text("<p>no run</p>")
    assert explore.main(command) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{path}: No such file" in told
    assert f"{path} replays no run" in told


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
    assert "http:" not in text
    assert "https:" not in text


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
