"""The debug tracer: keeps, prints and writes one `StepRecord` a step.

Records stay in memory (`engine.tracer.records`) and can be printed (`trace="console"` or
`LLM_TRACE=1`) or written as one JSON line each (`trace="steps.jsonl"`). `m1_single.timeline`
draws such a file. When tracing is off, the engine skips all of it with one test for None.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from milestone_llm.engine.protocols import QueueState, SettledStep

from .records import StepRecord


class Tracer:
    """Keeps `StepRecord`s and passes each on to the sinks it was given."""

    def __init__(self, sinks: list[Callable[[StepRecord], None]] | None = None) -> None:
        self.records: list[StepRecord] = []
        self.sinks = sinks or []

    def record(self, step: SettledStep, queues: QueueState) -> None:
        """Keep one record and show or write it.

        A sink that fails (a full disk, a closed pipe) gets no more records; the engine goes on.
        """
        record = StepRecord.of(step, queues)
        self.records.append(record)
        for sink in list(self.sinks):
            try:
                sink(record)
            except OSError as error:
                self.sinks.remove(sink)
                message = f"the trace ends with step {record.step}: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    @classmethod
    def from_option(cls, option: str | None) -> Tracer | None:
        """The tracer for `EngineConfig.trace`, or None when nothing is to be traced.

        Args:
            option: "console", "memory" (records are kept, nothing is shown), a path that ends in
                .jsonl, or None, which leaves the word to the environment variable `LLM_TRACE`.

        Raises:
            ValueError: the option is none of these.
        """
        option = option or {"1": "console"}.get(os.environ.get("LLM_TRACE", ""))
        if option is None:
            return None
        if option == "memory":
            return cls()
        if option == "console":
            from .console import ConsoleSink

            return cls([ConsoleSink()])
        if option.endswith(".jsonl"):
            return cls([JsonlSink(Path(option))])
        raise ValueError(f'trace must be "console", "memory" or a path in .jsonl, got {option!r}')


class JsonlSink:
    """Writes one JSON line a record; each is on disk when the step returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("w", encoding="utf-8")

    def __call__(self, record: StepRecord) -> None:
        """Append one line."""
        self._file.write(json.dumps(record.to_dict()) + "\n")
        self._file.flush()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The records of a trace file as plain data.

    Raises:
        ValueError: a line is no JSON, or lacks a field; the message names the line.
    """
    records = []
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            try:
                record = json.loads(line)
                record["step"], record["batch"], record["kv"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a trace record ({error!r})") from None
            records.append(record)
    return records
