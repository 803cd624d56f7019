"""Step records as JSON lines that hold only what changed: a long trace in a tenth of the space.

What is left out or short in a line is as in the record before it, which `changes_since` names:

    {"step": 12, "changes_since": 11, ...
     "batch": [["r0", 917], ["r1", 2, 31], {"request_id": "r2", "phase": "prefill", ...}],
     "waiting": {"less": ["r2"], "more": ["r9"]}, ...}

A row `[id, token, block, ...]` goes on where the request's row before ended: one token decoded,
this one sampled, these blocks new at the end of its table. A queue that is missing is the same as
before; `less` have left it and `more` stand at its end.
"""

from __future__ import annotations

import json
from typing import Any

from .records import BatchRow, StepRecord

QUEUES = ("waiting", "running", "swapped")


class Shortener:
    """Writes one record after the other, each as what changed since the one before."""

    def __init__(self) -> None:
        self._last: StepRecord | None = None
        self._rows: dict[str, BatchRow] = {}

    def full_line(self, record: StepRecord) -> str:
        """The whole record."""
        return self._remember(record, json.dumps(record.to_dict()))

    def line(self, record: StepRecord) -> str:
        """What changed since the record before; the whole record if it is the first."""
        last = self._last
        if last is None:
            return self.full_line(record)
        data = record.to_dict(has_batch=False)
        data["batch"] = [self._row(row) for row in record.batch]
        for name in QUEUES:
            queue = _queue_changes(getattr(last, name), data[name])
            if queue is None:
                del data[name]
            else:
                data[name] = queue
        short = {"step": data.pop("step"), "changes_since": last.step, **data}
        return self._remember(record, json.dumps(short, separators=(",", ":")))

    def _remember(self, record: StepRecord, line: str) -> str:
        self._last = record
        self._rows.update((row.request_id, row) for row in record.batch)
        for ended in record.finished:
            self._rows.pop(ended["request_id"], None)
        return line

    def _row(self, row: BatchRow) -> list[Any] | dict[str, Any]:
        last = self._rows.get(row.request_id)
        if (
            last is None
            or row.phase != "decode"
            or row.start != last.start + last.num_new_tokens
            or row.num_cached_tokens
            or row.blocks[: len(last.blocks)] != last.blocks
        ):
            return vars(row)
        return [row.request_id, row.sampled_token, *row.blocks[len(last.blocks) :]]


def _queue_changes(before: list[str], now: list[str]) -> list[str] | dict[str, list[str]] | None:
    """How to write a queue: None if it is the same, else who left and came, or all of it."""
    if before == now:
        return None
    less = set(before).difference(now)
    kept = [name for name in before if name not in less]
    if now[: len(kept)] != kept or len(less) > len(kept):
        return now
    return {"less": [name for name in before if name in less], "more": now[len(kept) :]}


class Restorer:
    """Reads lines one after the other and gives whole records."""

    def __init__(self) -> None:
        self._last: dict[str, Any] | None = None
        self._rows: dict[str, dict[str, Any]] = {}

    def record(self, line: str) -> dict[str, Any]:
        """The whole record of a line.

        Raises:
            ValueError: the line is no record, or the one that it builds on is missing.
        """
        try:
            data = json.loads(line)
            if "changes_since" in data:
                data = self._whole(data)
            data["step"], data["kv"]
            self._rows.update((row["request_id"], row) for row in data["batch"])
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"not a trace record ({error!r})") from None
        self._last = data
        return data

    def _whole(self, data: dict[str, Any]) -> dict[str, Any]:
        last, since = self._last, data.pop("changes_since")
        if last is None or last["step"] != since:
            raise ValueError(f"it builds on step {since}, which is not the line before")
        for name in QUEUES:
            queue = data.get(name)
            if queue is None:
                data[name] = last[name]
            elif isinstance(queue, dict):
                kept = [each for each in last[name] if each not in queue["less"]]
                data[name] = kept + queue["more"]
        data["batch"] = [
            self._whole_row(row) if isinstance(row, list) else row for row in data["batch"]
        ]
        return {name: data[name] for name in last}  # in the order of a full line

    def _whole_row(self, row: list[Any]) -> dict[str, Any]:
        name, token, *blocks = row
        last = self._rows[name]
        return {
            "request_id": name,
            "phase": "decode",
            "start": last["start"] + last["num_new_tokens"],
            "num_new_tokens": 1,
            "num_cached_tokens": 0,
            "sampled_token": token,
            "blocks": last["blocks"] + blocks if blocks else last["blocks"],
        }
