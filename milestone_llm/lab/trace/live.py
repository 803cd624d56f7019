"""Step records for readers that watch a running engine: a server's page, at most.

    live = LiveTrace(decode=engine.tokenizer.decode)
    engine.core.watchers.append(Tracer([live], keeps_records=False))
    ...
    with live.subscribe() as lines:                 # in a thread of the server, one a reader
        while (line := lines.get(timeout=1.0)) is not None or not is_gone():
            if line is not None:
                send(line + "\\n")

The engine puts a record into a queue and goes on: it never waits for a reader and writes no JSON.
A reader that is too slow misses the oldest records, and gets their number.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from .records import StepRecord

Decode = Callable[[list[int]], str]


def page_line(record: StepRecord, tables: dict[str, list[int]], **more: Any) -> str:
    """A record for the page, where block tables would be most of it.

    A row whose block table begins with the one that the page knows has `new_blocks`, those that
    follow it, in place of `blocks`; `readRecord` in reader.js puts them together.

    Args:
        tables: block tables that the page knows, by request; they are brought up to date.
        more: further fields.
    """
    data = record.to_dict()
    for row in data["batch"]:
        known, table = tables.get(row["request_id"], []), row["blocks"]
        if known and table[: len(known)] == known:
            row["new_blocks"] = row.pop("blocks")[len(known) :]
        tables[row["request_id"]] = table
    for ended in record.finished:
        tables.pop(ended["request_id"], None)
    return json.dumps(data | more, separators=(",", ":"))


class LiveTrace:
    """A tracer sink that any number of readers subscribe to, from any thread.

    Args:
        max_records: records that a reader may be behind; a new one begins with as many.
        decode: text of token ids; with it, lines bring the text of tokens not seen before.
    """

    def __init__(self, max_records: int = 256, decode: Decode | None = None) -> None:
        self.max_records = max_records
        self.decode = decode
        self._recent: deque[StepRecord] = deque(maxlen=max_records)
        self._readers: set[Subscription] = set()
        self._lock = threading.Lock()

    def __call__(self, record: StepRecord) -> None:
        """Give every reader a record. Takes microseconds, whatever readers do."""
        with self._lock:
            self._recent.append(record)
            for reader in self._readers:
                reader.put(record)

    def subscribe(self) -> Subscription:
        """A new reader. Close it when it is no longer read."""
        with self._lock:
            reader = Subscription(self, list(self._recent))
            self._readers.add(reader)
        return reader

    @property
    def num_readers(self) -> int:
        """Readers that have not been closed."""
        return len(self._readers)

    def clear(self) -> None:
        """Forget the records so far: who subscribes next begins with what comes."""
        with self._lock:
            self._recent.clear()

    def forget(self, reader: Subscription) -> None:
        """What closing a reader does."""
        with self._lock:
            self._readers.discard(reader)


class Subscription:
    """Lines for one reader: records as `page_line` writes them, or `{"num_dropped": 12}`.

    `num_dropped` counts the records that this reader was too slow for. To be read by one thread.
    """

    def __init__(self, live: LiveTrace, recent: list[StepRecord]) -> None:
        self.num_dropped = 0
        self._live = live
        self._records: deque[StepRecord] = deque(recent)
        self._changed = threading.Condition()
        self._is_closed = False
        self._num_told = 0
        self._tables: dict[str, list[int]] = {}
        self._texts: dict[int, str] = {}

    def put(self, record: StepRecord) -> None:
        """For `LiveTrace`: one more record, in place of the oldest if there are too many."""
        with self._changed:
            if len(self._records) >= self._live.max_records:
                self._records.popleft()
                self.num_dropped += 1
            self._records.append(record)
            self._changed.notify()

    def get(self, timeout: float | None = None) -> str | None:
        """The next line, without its end. None if none came in `timeout` seconds, or it is closed.

        Without a timeout it waits until there is one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._records or self._is_closed, timeout)
            if self._is_closed or not self._records:
                return None
            if self.num_dropped > self._num_told:
                self._num_told = self.num_dropped
                return json.dumps({"num_dropped": self.num_dropped})
            record = self._records.popleft()
        texts = self._new_texts(record)  # outside the lock: the engine need not wait for it
        return page_line(record, self._tables, **({"texts": texts} if texts else {}))

    def _new_texts(self, record: StepRecord) -> dict[int, str]:
        tokens = {row.sampled_token for row in record.batch} - self._texts.keys() - {None}
        decode = self._live.decode
        new = {token: decode([token]) for token in tokens if token is not None} if decode else {}
        self._texts |= new
        return new

    def __iter__(self) -> Iterator[str]:
        """Lines until it is closed."""
        while (line := self.get()) is not None:
            yield line

    def close(self) -> None:
        """Read no more; a waiting `get` returns None."""
        self._live.forget(self)
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def __enter__(self) -> Subscription:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
