"""Steps of a trace in a few short lines each, so that two runs fit side by side."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby

from milestone_llm.trace.records import BatchRow, StepEvent, StepRecord, step_events
from milestone_llm.trace.text import id_ranges

from .exhibit import Run

_BLOCKS = re.compile(
    r"(\[|^(?:alloc|copy_on_write|evict|free|release|share) )([\d →-]+)(?=\]$| \(|$)"
)
_RANGE = re.compile(r"(\d+)-(\d+)")


def lines(run: Run) -> list[list[str]]:
    """Of each step what was computed, what happened in its order, who waits, the free blocks.

    b 4..7 → 31  [0 2]            row of b: positions computed, token sampled, block table
    b 0..3 of 8  [0 2]            a row that ends before the last known token
    share 0 (b)                   b's table has block 0, too
    """
    known = run.known()
    num_known = {name: len(prompt) for name, prompt in run.prompts.items()}
    steps = []
    for record in run.records:
        rows = [_row(row, known[row.request_id], num_known[row.request_id]) for row in record.batch]
        steps.append([*rows, *_events(record)])
        for row in record.batch:
            if row.sampled_token is not None:
                num_known[row.request_id] = max(num_known[row.request_id], row.end + 1)
    return steps


def without_numbers(line: str) -> str:
    """A line with the number of its blocks in place of their ids: which they are says little."""

    def count(ids: re.Match[str]) -> str:
        ranges = [(int(first), int(last)) for first, last in _RANGE.findall(ids[2])]
        singles = _RANGE.sub("", ids[2]).replace("→", " ").split()
        return f"{ids[1]}{len(singles) + sum(last - first + 1 for first, last in ranges)} blocks"

    return _BLOCKS.sub(count, line)


def _row(row: BatchRow, known: Sequence[int], num_known: int) -> str:
    if row.phase == "padding":
        return f"{row.request_id} in vain"
    where = f"{row.start}..{row.end - 1}" if row.num_new_tokens > 1 else str(row.start)
    if row.num_new_tokens < 1:
        where = "nothing"
    if row.end < num_known:
        where += f" of {num_known}"
    sampled = ""
    if row.sampled_token is not None:
        accepted = known[row.start + 1 : row.end] if row.num_accepted_tokens else []
        sampled = " → " + " ".join(map(str, [*accepted, row.sampled_token]))
    if row.num_draft_tokens:
        sampled += f", {row.num_accepted_tokens} of {row.num_draft_tokens} guesses"
    cached = f", {row.num_cached_tokens} cached" if row.num_cached_tokens else ""
    allowed = f", {row.num_allowed_tokens} allowed" if row.num_allowed_tokens else ""
    what = f"{where}{sampled}{allowed}{cached}"
    return f"{row.request_id} {what} [{' '.join(id_ranges(row.blocks or []))}]"


def _events(record: StepRecord) -> Iterator[str]:
    for kind, group in groupby(step_events(record), lambda event: event.kind):
        if kind == "arrived":
            yield f"arrived {' '.join(str(event.request_id) for event in group)}"
        elif kind != "admitted":  # its row says so
            yield from map(_event, group)
    for name, reason in record.waiting_reasons.items():
        yield f"waits {name}: {reason}"
    others = [name for name in record.waiting if name not in record.waiting_reasons]
    if others:
        yield f"waits {' '.join(others)}"
    cached = f", {record.kv.cached} cached" if record.kv.cached else ""
    yield f"free {record.kv.free} of {record.kv.total}{cached}"


def _event(event: StepEvent) -> str:
    if not event.blocks:
        return f"{event.kind} {event.request_id}" + (f": {event.reason}" if event.reason else "")
    joint = "→" if event.kind == "copy_on_write" else " "
    blocks = (
        joint.join(map(str, event.blocks)) if joint == "→" else " ".join(id_ranges(event.blocks))
    )
    return f"{event.kind} {blocks}" + (f" ({event.request_id})" if event.request_id else "")
