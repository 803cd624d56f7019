"""Step records for readers that watch a running engine, such as the page of a server.

    live = LiveTrace(decode=engine.tokenizer.decode)
    engine.step_log.watch(Tracer([live], keeps_records=False))
    ...
    with live.subscribe() as lines:                 # in a thread of the server, one a reader
        while (line := lines.get(timeout=1.0)) is not None or not is_gone():
            if line is not None:
                send(line + "\\n")

The engine stores a record and goes on: it never waits for a reader, and writes no JSON. A reader
that is too slow misses the oldest records, and is told how many.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from milestone_llm.trace.records import StepRecord, step_events
from milestone_llm.trace.text import token_text

from .positions import Positions

Decode = Callable[[list[int]], str]
NAME_LENGTH = 60
"""Characters of a prompt that are shown with its request."""
MAX_NAMES = 1000


class PageLines:
    """Writes records as lines for one page, which gets all of them in order.

    In addition to the fields of a record, a line has `step_events`, the events of the step in their
    order, and `useful` and `computed`: positions of all steps so far. Block tables would be most of
    the line. So a row whose table begins with the one that the page knows has only `new_blocks`,
    the blocks after these, instead of `blocks`. `readRecord` in reader.js joins them.
    """

    def __init__(self) -> None:
        self._tables: dict[str, list[int]] = {}
        self._positions = Positions()

    def line(self, record: StepRecord, **more: Any) -> str:
        """Return the next record as one line, with further fields."""
        data = record.to_dict()
        for row in data["batch"]:
            known, table = self._tables.get(row["request_id"], []), row["blocks"]
            if known and table[: len(known)] == known:
                row["new_blocks"] = row.pop("blocks")[len(known) :]
            self._tables[row["request_id"]] = table
        data["step_events"] = [vars(event) for event in step_events(record)]
        for ended in record.finished:
            self._tables.pop(ended["request_id"], None)
        self._positions.take(record)
        more |= {"useful": self._positions.useful, "computed": self._positions.computed}
        return json.dumps(data | more, separators=(",", ":"))


class LiveTrace:
    """A tracer sink with any number of readers, which subscribe from any thread.

    Args:
        max_records: most records that a reader may be late; a new reader begins with as many.
        decode: returns the text of token ids; with it, lines have the text of new tokens.
    """

    def __init__(self, max_records: int = 256, decode: Decode | None = None) -> None:
        self.decode = decode
        self.recent: deque[StepRecord] = deque(maxlen=max_records)
        self.beginnings = dict[str, str]()
        """Beginnings of the newest requests' prompts, by request id: ids alone look alike."""
        self.num_records = 0
        """Records so far; the number of the last one in `recent` is one less."""
        self.readers: set[Subscription] = set()
        self.changed = threading.Condition()

    def __call__(self, record: StepRecord) -> None:
        """Keep a record for the readers. Takes microseconds, and does not wait for them."""
        with self.changed:
            self.recent.append(record)
            self.num_records += 1
            self.changed.notify_all()

    def name(self, request_id: str, prompt: str) -> None:
        """Remember the beginning of a request's prompt."""
        self.beginnings[request_id] = " ".join(prompt[:200].split())[:NAME_LENGTH]
        if len(self.beginnings) > MAX_NAMES:
            self.beginnings.pop(next(iter(self.beginnings)), None)

    def subscribe(self) -> Subscription:
        """Add a reader. Close it after its last use."""
        with self.changed:
            reader = Subscription(self)
            self.readers.add(reader)
        return reader

    @property
    def num_readers(self) -> int:
        """Number of readers that have not been closed."""
        return len(self.readers)

    def clear(self) -> None:
        """Forget the records so far: the next subscriber begins with the next record."""
        with self.changed:
            self.recent.clear()


class Subscription:
    """Lines for one reader: records as `PageLines` writes them, or `{"num_dropped": 12}`.

    `num_dropped` counts the records that this reader missed. Only one thread may read.
    """

    def __init__(self, live: LiveTrace) -> None:
        self.num_dropped = 0
        self._live = live
        self._next = live.num_records - len(live.recent)
        self._lines = PageLines()
        self._texts: dict[int, str] = {}
        self._named: set[str] = set()

    def get(self, timeout: float | None = None) -> str | None:
        """Return the next line without its end. None: no line within `timeout` seconds, or closed.

        Without a timeout, wait until there is a line.
        """
        live = self._live
        with live.changed:
            live.changed.wait_for(lambda: self._next < live.num_records or self._is_closed, timeout)
            if self._is_closed or self._next == live.num_records:
                return None
            first = live.num_records - len(live.recent)
            if self._next < first:
                self.num_dropped += first - self._next
                self._next = first
                return json.dumps({"num_dropped": self.num_dropped})
            record = live.recent[self._next - first]
            self._next += 1
        texts = self._new_texts(record)  # outside the lock, so that the engine need not wait
        more = {"texts": texts, "beginnings": self._new_beginnings(record)}
        return self._lines.line(record, **{name: new for name, new in more.items() if new})

    @property
    def _is_closed(self) -> bool:
        return self not in self._live.readers

    def _new_texts(self, record: StepRecord) -> dict[int, str]:
        tokens = {row.sampled_token for row in record.batch} - self._texts.keys() - {None}
        decode = self._live.decode
        new = dict[int, str]()
        if decode is not None:
            new = {token: token_text(decode, token) for token in tokens if token is not None}
        self._texts |= new
        return new

    def _new_beginnings(self, record: StepRecord) -> dict[str, str]:
        here = {row.request_id for row in record.batch} | {*record.waiting, *record.arrived}
        new = {name.partition("/")[0] for name in here} - self._named
        self._named |= new
        known = self._live.beginnings
        return {name: known[name] for name in new if name in known}

    def close(self) -> None:
        """Stop reading; a waiting `get` returns None."""
        with self._live.changed:
            self._live.readers.discard(self)
            self._live.changed.notify_all()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
