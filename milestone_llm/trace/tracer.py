"""The debug tracer: keeps, prints and writes one `StepRecord` a step.

Records stay in memory (`engine.tracer.records`) and can be printed (`trace="console"` or
`LLM_TRACE=1`) or written as one JSON line each (`trace="steps.jsonl"`, or `.jsonl.gz`), for
`m1_single.timeline` to draw and `explore` to make a page of. When tracing is off, the engine skips
all of it with one test for None.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from milestone_llm.core.errors import InputError
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.watching import SettledStep

from .jsonl import JsonlSink
from .records import StepRecord

Decode = Callable[[list[int]], str]


class Tracer:
    """Keeps `StepRecord`s and passes each on to the sinks it was given.

    Args:
        keeps_records: whether `records` grows; a server that runs for weeks wants sinks alone.
    """

    def __init__(
        self,
        sinks: list[Callable[[StepRecord], None]] | None = None,
        keeps_records: bool = True,
    ) -> None:
        self.records: list[StepRecord] = []
        self.sinks = sinks or []
        self.keeps_records = keeps_records
        self._start: float | None = None

    def record(self, step: SettledStep, scheduler: BaseScheduler) -> None:
        """Keep one record and show or write it.

        A sink that fails (a full disk, a closed pipe) gets no more records; the engine goes on.
        """
        if self._start is None:
            self._start = step.times[0]
        record = StepRecord.of(step, scheduler, self._start)
        if self.keeps_records:
            self.records.append(record)
        for sink in list(self.sinks):
            try:
                sink(record)
            except OSError as error:
                self.sinks.remove(sink)
                message = f"the trace ends with step {record.step}: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)

    @classmethod
    def from_option(cls, option: str | None, decode: Decode | None = None) -> Tracer | None:
        """The tracer for `EngineConfig.trace`, or None when nothing is to be traced.

        Args:
            option: "console", "memory" (records are kept, nothing is shown), a path that ends in
                .jsonl or .jsonl.gz, or None. `LLM_TRACE=1` in the environment prints every step
                besides, whatever the program has chosen.
            decode: text of token ids, to be printed beside sampled ones.

        Raises:
            InputError: the option, or the variable, is none of these.
        """
        path = trace_path(option)
        sinks: list[Callable[[StepRecord], None]] = [] if path is None else [JsonlSink(path)]
        is_printed = _prints_every_step()
        if option == "console" or is_printed:
            from .console import ConsoleSink

            sinks.append(ConsoleSink(decode=decode))
        return None if option is None and not is_printed else cls(sinks)


def trace_path(option: str | None) -> Path | None:
    """The file that `EngineConfig.trace` names, if it does.

    Raises:
        InputError: the option is none that it knows.
    """
    if option is not None and option.endswith((".jsonl", ".jsonl.gz")):
        return Path(option)
    if option not in (None, "console", "memory"):
        known = '"console", "memory" or a path in .jsonl or .jsonl.gz'
        raise InputError(f"trace must be {known}, got {option!r}")
    return None


def _prints_every_step() -> bool:
    """Whether `LLM_TRACE` says so.

    Raises:
        InputError: it says something else.
    """
    value = os.environ.get("LLM_TRACE", "")
    if value not in ("", "0", "1"):
        raise InputError(f"LLM_TRACE must be 1 (print every step) or 0, got {value!r}")
    return value == "1"
