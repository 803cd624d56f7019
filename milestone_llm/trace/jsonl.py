"""Traces as files: one JSON line for each step, in `.jsonl` or compressed in `.jsonl.gz`."""

from __future__ import annotations

import gzip
import json
import weakref
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TextIO

from pydantic import ValidationError

from milestone_llm.core.errors import InputError

from .records import StepRecord


class JsonlSink:
    """Writes one JSON line for each record. It is on disk when the step returns.

    Raises:
        InputError: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = _open(path, "wt")
        except (OSError, ValueError) as error:  # ValueError: not a valid file name
            reason = getattr(error, "strerror", None) or error
            raise InputError(f"cannot write {path}: {reason}") from None
        weakref.finalize(self, self._file.close)

    def __call__(self, record: StepRecord) -> None:
        """Append one line."""
        self._file.write(json.dumps(record.to_dict()) + "\n")
        self._file.flush()


def read_run(path: str | Path) -> list[StepRecord]:
    """Return the records of a trace file with one run.

    A compressed file may lack its end, because it may still be written.

    Raises:
        InputError: the file cannot be read, is empty or has several runs, or a line is not a
            record; the message names the line.
    """
    records: list[StepRecord] = []
    known: set[str | None] = {None}  # an eviction has no request
    try:
        with _open(Path(path), "rt") as file:
            for line in file:
                record = StepRecord.from_json(line)
                known |= record.requests
                for name in {event.request_id for event in record.events} - known:
                    raise ValueError(f"events.request_id: {name!r:.100} is no request of this run")
                if records and record.step <= records[-1].step:
                    follows = f"step {record.step} follows step {records[-1].step}"
                    raise InputError(f"{follows}: the file holds several runs")
                records.append(record)
    except EOFError:  # of gzip
        pass
    except ValidationError as error:
        wrong = error.errors()[0]
        where = ".".join(map(str, wrong["loc"])).encode("unicode_escape").decode()
        what = f"not a record of an engine's step: {where or 'the line'}: {wrong['msg']}"
        raise InputError(f"{path}, line {len(records) + 1}: {what}") from None
    except (ValueError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{path}, line {len(records) + 1}: {error}") from None
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from None
    if not records:
        raise InputError(f"{path}, line 1: the file is empty, the trace has no steps")
    return records


def read_runs(paths: Sequence[str], titles: str | None) -> list[tuple[str, list[StepRecord]]]:
    """Return the runs to be shown together, each with its title: from `titles`, separated by
    commas, or else its milestone. Errors as in `read_run`, or if the counts differ.
    """
    runs = [read_run(path) for path in paths]
    labels = titles.split(",") if titles else [records[0].milestone for records in runs]
    if len(labels) != len(runs):
        raise InputError(f"there are {len(runs)} traces, but {len(labels)} labels")
    return list(zip(labels, runs, strict=True))


def _open(path: Path, mode: Literal["rt", "wt"]) -> TextIO:
    if path.suffix == ".gz":
        return gzip.open(path, mode, compresslevel=5, encoding="utf-8")
    return path.open(mode, encoding="utf-8")
