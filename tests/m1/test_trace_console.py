"""The console trace: what it says of a step, every width, ASCII, many rows, changes."""

from __future__ import annotations

import io
from typing import Any

from rich.cells import cell_len
from rich.console import Console

from helpers.traces import row, step
from milestone_llm.core.kv import KVEvent, KVUsage
from milestone_llm.trace.console import ConsoleSink, print_changes
from milestone_llm.trace.records import StepRecord, steps_with_changes


def full_step() -> StepRecord:
    """A step in which everything happens."""
    return step(
        12,
        [
            row("r1", "prefill", 64, 48, num_cached_tokens=64, blocks=[3, 9, 4, 5, 6, 7]),
            row("r2", "decode", 30, 1, sampled_token=917, blocks=[0, 1]),
            row("r0", "decode", 41, 1, sampled_token=2, blocks=[9, 12, 11]),
        ],
        milestone="m4_prefix_chunked",
        waiting=["r7", "r8"],
        running=["r1", "r2"],
        swapped=["r5"],
        admitted=["r1"],
        resumed=["r2"],
        preempted=[{"request_id": "r5", "reason": "no free block for r2"}],
        finished=[{"request_id": "r0", "reason": "stop"}],
        kv=KVUsage("block", 64, 40, 51, 640, 598, 10),
        events=[
            KVEvent("swap_out", "r5", [1]),
            KVEvent("free", "r5", [1]),
            KVEvent("alloc", "r2", [1]),
            KVEvent("copy_on_write", "r2", [4, 12]),
            KVEvent("alloc", "r1", [9]),
            KVEvent("free", "r0", [9, 12, 11], held=[9]),
        ],
        start_s=1.204,
        arrived=["r7", "r8"],
        waiting_reasons={"r7": "max_num_seqs=3 requests are running"},
    )


def printed(record: StepRecord, width: int = 80, encoding: str = "utf-8", **options: Any) -> str:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    ConsoleSink(Console(file=file, width=width), **options)(record)
    file.flush()
    return raw.getvalue().decode(encoding)


def test_a_step_says_who_computed_what_and_what_happened() -> None:
    record = full_step()
    record.batch.append(row("r3", num_draft_tokens=4, num_accepted_tokens=1))
    lines = [" ".join(line.split()) for line in printed(record).splitlines()]
    assert lines[2] == "r1 ▸ prefill +48 - 64..111 112 - 64 3 9 4-7"
    labels = [line.split()[0] for line in lines[6:-1]]
    assert " ".join(labels) == (
        "arrived preempted kv kv resumed kv kv admitted kv finished kv kv queues waits kv 598 time"
    )
    for told in (
        "1 of 4", "r5: no free block for r2", "swap_out 1 block: 1 (r5)", "1 copy: 4 12 (r2)",
        "free 2 blocks: 12 11 (r0)", "9 (r0), still held by r1\n",
        "waiting 2: r7 r8 | running 2: r1 r2 | swapped 1: r5",
        "40 of 64 blocks used, 24 free (10 cached)", "640 reserved (6.6% empty)", "execute 8.0 ms",
    ):  # fmt: skip
        assert told in "\n".join(lines)
    record.expert_load = {"num_experts": 128, "num_met": 49.04, "largest_share": 0.0469}
    assert "experts 49.0 of 128 met" in " ".join(printed(record).split())
    text = printed(record, 100, decode=lambda token_ids: f" é\n{token_ids[0]}")
    assert "917  ' é\\n917'" in text


def test_ascii_consoles_get_ascii_and_markup_in_an_id_is_text() -> None:
    record = full_step()
    record.batch += [row("问题\n", start=3), row("[red]x", start=3)]
    text = printed(record, encoding="ascii")
    assert text.isascii()
    for shown in ("??\\n", "[red]x", "> prefill", "* decode", "[###############++++.....]"):
        assert shown in text


def test_no_line_is_wider_than_the_console_or_ends_in_spaces() -> None:
    record = full_step()
    record.batch.append(row("a-very-long-request-id-问题-0001", "decode", 30000, 1))
    record.preempted[0]["reason"] += ", the most recently admitted of the running requests" * 2
    record.waiting.extend(f"r{number}" for number in range(100, 400))
    for width in (*range(20, 121, 5), 200):
        for line in printed(record, width).splitlines():
            assert cell_len(line) <= width
            assert line == line.rstrip()


def test_of_many_who_come_at_once_16_rows_are_shown_in_few_lines() -> None:
    batch = [row(f"r{n}", "prefill" if n > 250 else "decode", 9, 1 + n // 251) for n in range(256)]
    names = [one.request_id for one in batch]
    events = [KVEvent("alloc", name, [place]) for place, name in enumerate(names)]
    text = printed(step(3, batch, running=names, admitted=names, events=events))
    assert "   … 240 more rows: 235 decode (+235), 5 prefill (+10)\n" in text
    assert len(text.splitlines()) < 60, "those who come in one after the other share a line"


def test_of_a_run_the_first_step_the_last_and_all_changes_are_shown_with_the_gaps() -> None:
    records = [
        step(0, [row("a", "prefill", 0, 4), row("b", "prefill", 0, 4)], admitted=["a", "b"]),
        *(step(number, [row("a"), row("b")]) for number in range(1, 10)),
        *(step(number, [row("a")]) for number in range(10, 30)),
    ]
    records[9].finished.append({"request_id": "b", "reason": "length"})
    records[15].events.append(KVEvent("alloc", "a", [3]))
    records[18].events.append(KVEvent("swap_out", "a", [3]))
    records[22].preempted.append({"request_id": "a", "reason": "none free"})
    records[24].resumed.append("a")
    for record in records[26:28]:
        record.waiting.append("c")
    shown = [record.step for record in steps_with_changes(records)]
    assert shown == [0, 1, 9, 10, 18, 22, 24, 26, 29]
    file = io.StringIO()
    print_changes(records, ConsoleSink(Console(file=file, width=80)))
    assert "… 7 steps like step 1 …\n" in file.getvalue()
