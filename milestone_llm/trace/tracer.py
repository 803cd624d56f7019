"""The debug tracer: it keeps, prints and writes one `StepRecord` for each step.

Records are kept in memory (`engine.tracer.records`). They can be printed (`trace="console"` or
`MILESTONE_LLM_TRACE=1`), or written as one JSON line each (`trace="steps.jsonl"`, or `.jsonl.gz`),
which `m1_single.timeline` draws and `explore` turns into a page. When tracing is off, the engine
skips all of this with one test for None.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path

from milestone_llm.core.errors import InputError
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.step_log import LoggedStep

from .jsonl import JsonlSink
from .records import StepRecord

Decode = Callable[[list[int]], str]


class Tracer:
    """Keeps `StepRecord`s, and passes each on to its sinks.

    Args:
        keeps_records: whether `records` grows; a server that runs for weeks uses sinks only.
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

    def record(self, step: LoggedStep, scheduler: BaseScheduler) -> None:
        """Make one record, keep it, and pass it on to the sinks.

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
        """Return the tracer for `EngineConfig.trace`; None: no tracing.

        Args:
            option: "console", "memory" (records are kept, nothing is shown), a path that ends in
                .jsonl or .jsonl.gz, or None. `MILESTONE_LLM_TRACE=1` in the environment also prints
                every step, with every option.
            decode: returns the text of token ids, printed next to sampled tokens.

        Raises:
            InputError: the option, or the variable, has another value.
        """
        path = trace_path(option)
        sinks: list[Callable[[StepRecord], None]] = [] if path is None else [JsonlSink(path)]
        is_printed = _prints_every_step()
        if option == "console" or is_printed:
            from .console import ConsoleSink

            sinks.append(ConsoleSink(decode=decode))
        return None if option is None and not is_printed else cls(sinks)


def trace_path(option: str | None) -> Path | None:
    """Return the path in `EngineConfig.trace`, if it is one.

    Raises:
        InputError: the option has an unknown value.
    """
    if option is not None and option.endswith((".jsonl", ".jsonl.gz")):
        return Path(option)
    if option not in (None, "console", "memory"):
        known = '"console", "memory" or a path in .jsonl or .jsonl.gz'
        raise InputError(f"trace must be {known}, got {option!r}")
    return None


def _prints_every_step() -> bool:
    """Return whether `MILESTONE_LLM_TRACE`, or `LLM_TRACE` as it was called before, is 1.

    Raises:
        InputError: it has an unknown value.
    """
    value = os.environ.get("MILESTONE_LLM_TRACE") or os.environ.get("LLM_TRACE", "")
    if value not in ("", "0", "1"):
        raise InputError(f"MILESTONE_LLM_TRACE must be 1 (print every step) or 0, got {value!r}")
    return value == "1"
