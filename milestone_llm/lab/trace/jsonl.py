"""Traces as files: one JSON line a step, in `.jsonl` or compressed in `.jsonl.gz`."""

from __future__ import annotations

import gzip
import weakref
import zlib
from pathlib import Path
from typing import Any, Literal, TextIO

from .compact import Restorer, Shortener
from .records import StepRecord

MAX_FULL_CHARS = 1_000_000
"""Up to here every line of a file stands alone; from then on lines hold changes (`compact`)."""


def is_trace_path(name: str) -> bool:
    """Whether a trace can be written under this name."""
    return name.endswith((".jsonl", ".jsonl.gz"))


class JsonlSink:
    """Writes one JSON line a record; each is on disk when the step returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = _open(path, "wt")
        self._shortener = Shortener()
        self._num_chars = 0
        weakref.finalize(self, self._file.close)

    def __call__(self, record: StepRecord) -> None:
        """Append one line."""
        is_short = self._num_chars >= MAX_FULL_CHARS
        line = (self._shortener.line if is_short else self._shortener.full_line)(record)
        self._num_chars += len(line)
        self._file.write(line + "\n")
        self._file.flush()


def read_jsonl(path: str | Path) -> list[dict[str, Any]]:
    """The records of a trace file as plain data, each whole.

    A compressed file may lack its end, as one does that is still being written.

    Raises:
        ValueError: a line is no record, lacks a field or is cut off; the message names the line.
    """
    records: list[dict[str, Any]] = []
    restorer = Restorer()
    with _open(Path(path), "rt") as file:
        try:
            for line in file:
                records.append(restorer.record(line))
        except EOFError:  # of gzip
            pass
        except (ValueError, gzip.BadGzipFile, zlib.error) as error:
            raise ValueError(f"{path}, line {len(records) + 1}: {error}") from None
    return records


def _open(path: Path, mode: Literal["rt", "wt"]) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, mode, compresslevel=5, encoding="utf-8")
    return path.open(mode, encoding="utf-8")
