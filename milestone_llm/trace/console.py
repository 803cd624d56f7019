"""Prints `StepRecord`s for people: one compact table a step, in a terminal or a plain log.

Words and glyphs carry the meaning, colour only helps: a request keeps its colour from step to
step. Lines are fitted to the console's width here, so that nothing wraps, and only ASCII is
written where the encoding knows no more.
"""

from __future__ import annotations

from collections import Counter

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from milestone_llm.plots.style import request_color
from milestone_llm.trace.records import BatchRow, StepRecord

from .telling import gap_text, telling_records
from .text import Glyphs, fit, fit_list, id_ranges, kv_text, pad, plural, safe

__all__ = ["ConsoleSink", "print_telling", "telling_records"]

_LABEL_WIDTH = 10
_MAX_ID_WIDTH = 16
_DROP_ORDER = ("context", "cached", "sampled", "blocks", "slot", "tokens")
_NUMBERS = ("context", "cached", "sampled", "slot")
_PHASE_WEIGHT = {"prefill": "bold", "decode": "", "padding": "dim"}


class ConsoleSink:
    """A tracer sink that prints each record.

    Args:
        console: where to print; standard output if None.
        show_times: print the milliseconds of each step. Without them, the same work prints the
            same text.
        max_rows: rows shown of a batch; the rest is summed up in one line.
    """

    def __init__(
        self, console: Console | None = None, show_times: bool = True, max_rows: int = 16
    ) -> None:
        self.console = console or Console()
        self.show_times = show_times
        self.max_rows = max_rows
        self._index: dict[str, int] = {}

    def __call__(self, record: StepRecord) -> None:
        """Print one record."""
        glyphs = Glyphs.of(self.console)
        lines = self._header(record, glyphs) + self._batch(record, glyphs)
        lines += self._changes(record, glyphs) + self._queues(record, glyphs)
        for number, text in enumerate(kv_text(record.kv, self._space, glyphs)):
            lines += self._labelled("" if number else "kv", Text(text))
        if self.show_times:
            times = (
                f"schedule {record.schedule_ms:.1f} ms, execute {record.execute_ms:.1f} ms, "
                f"update {record.update_ms:.1f} ms"
            )
            lines += self._labelled("time", Text(times, "dim"))
        for line in [*lines, Text()]:
            self.print_line(line)

    def print_line(self, line: Text) -> None:
        """Print one line, cut at the console's width."""
        line.truncate(self.console.width, overflow="crop")
        line.rstrip()
        self.console.print(line, soft_wrap=True)

    @property
    def _space(self) -> int:
        """Cells beside a label."""
        return max(self.console.width - _LABEL_WIDTH, 12)

    def _header(self, record: StepRecord, glyphs: Glyphs) -> list[Text]:
        counts = {
            "prefill": record.num_prefill_tokens,
            "decode": record.num_decode_tokens,
            "padding": record.num_padding_tokens,
        }
        shown = [f"{count:,} {name}" for name, count in counts.items() if count] or ["0"]
        totals = " + ".join(shown) + (" token" if sum(counts.values()) == 1 else " tokens")
        if record.num_padding_tokens:
            useful = 1 - record.num_padding_tokens / sum(counts.values())
            totals += f" ({useful:.0%} useful)"
        line = Text().append(f"{glyphs.rule * 2} step {record.step}  {record.milestone}  ", "bold")
        if len(line) + len(totals) > self.console.width:
            return [line, *Text(totals).wrap(self.console, self.console.width)]
        line.append(totals)
        rest = self.console.width - len(line) - 2
        return [line.append("  " + glyphs.rule * rest, "dim") if rest > 1 else line]

    def _batch(self, record: StepRecord, glyphs: Glyphs) -> list[Text]:
        """Head, rows, and the rest in one line."""
        rows = record.batch[: self.max_rows]
        if not rows:
            return [Text("   nothing to compute")]
        columns = self._fit_columns(self._columns(record, rows, glyphs), rows, glyphs)
        lines = []
        for number in range(len(rows) + 1):
            line = Text("   ")
            for key, cells in columns.items():
                cell = pad(cells[number], _width(cells), key in _NUMBERS)
                style = "dim"  # the head
                if number:
                    row = rows[number - 1]
                    style = self._color(row) if key == "who" else _PHASE_WEIGHT[row.phase]
                line.append(cell, style).append("  ")
            lines.append(line)
        return lines + self._rest(record.batch[self.max_rows :], glyphs)

    def _fit_columns(
        self, columns: dict[str, list[str]], rows: list[BatchRow], glyphs: Glyphs
    ) -> dict[str, list[str]]:
        """Leave out columns until the rest fits, the most redundant first; shorten block lists."""
        space = self.console.width - 3
        for name in (None, *_DROP_ORDER):
            columns.pop(str(name), None)
            others = sum(_width(cells) + 2 for key, cells in columns.items() if key != "blocks")
            if others + (10 if "blocks" in columns else -2) <= space:
                break
        if "blocks" in columns:
            fitted = [fit_list(id_ranges(row.blocks), space - others, glyphs) for row in rows]
            columns["blocks"] = ["blocks", *(" ".join(words) for words in fitted)]
        return columns

    def _columns(
        self, record: StepRecord, rows: list[BatchRow], glyphs: Glyphs
    ) -> dict[str, list[str]]:
        cells: dict[str, list[str]] = {
            "who": [fit(safe(row.request_id, glyphs), _MAX_ID_WIDTH, glyphs) for row in rows],
            "phase": [f"{glyphs.phase[row.phase]} {row.phase}" for row in rows],
            "tokens": _token_cells(rows),
            "context": [
                "-" if row.phase == "padding" else str(row.start + row.num_new_tokens)
                for row in rows
            ],
            "sampled": [
                "-" if row.sampled_token is None else str(row.sampled_token) for row in rows
            ],
        }
        if any(row.num_cached_tokens for row in rows):
            cells["cached"] = [str(row.num_cached_tokens or "-") for row in rows]
        if any(row.blocks for row in rows):
            key = "slot" if record.kv.unit == "slot" else "blocks"
            cells[key] = [" ".join(id_ranges(row.blocks)) for row in rows]
        return {key: [key, *column] for key, column in cells.items()}

    def _rest(self, rows: list[BatchRow], glyphs: Glyphs) -> list[Text]:
        if not rows:
            return []
        parts = []
        for phase, count in Counter(row.phase for row in rows).items():
            tokens = sum(row.num_new_tokens for row in rows if row.phase == phase)
            parts.append(f"{count} {phase} (+{tokens:,})")
        return [Text(f"   {glyphs.gap} {plural(len(rows), 'more row')}: {', '.join(parts)}")]

    def _changes(self, record: StepRecord, glyphs: Glyphs) -> list[Text]:
        """Who came and went, and what happened to KV memory."""
        lines: list[Text] = []
        for label, names in (("admitted", record.admitted), ("resumed", record.resumed)):
            if names:
                lines += self._labelled(label, self._ids(names, self._space, glyphs))
        for label, entries in (("preempted", record.preempted), ("finished", record.finished)):
            by_reason: dict[str, list[str]] = {}
            for entry in entries:
                by_reason.setdefault(entry["reason"], []).append(entry["request_id"])
            for reason, names in by_reason.items():
                why = f": {safe(reason, glyphs)}"
                ids = self._ids(names, max(self._space - len(why), 20), glyphs)
                lines += self._labelled(label, ids.append(why))
        for kind in dict.fromkeys(event.type for event in record.events):
            events = [event for event in record.events if event.type == kind]
            blocks = [block for event in events for block in event.blocks]
            is_copy = kind == "copy_on_write"
            count = plural(len(events), "copy") if is_copy else plural(len(blocks), record.kv.unit)
            text = f"{kind} {count}: "
            words = fit_list(id_ranges(blocks), self._space - len(text), glyphs)
            lines += self._labelled("kv", Text(text + " ".join(words)))
        return lines

    def _queues(self, record: StepRecord, glyphs: Glyphs) -> list[Text]:
        """All in one line if they fit, else a line each."""
        parts = []
        for name in ("waiting", "running", "swapped"):
            names = getattr(record, name)
            part = Text(f"{name} {len(names)}")
            if names:
                part.append(": ").append_text(self._ids(names, self._space - len(part) - 2, glyphs))
            if names or name != "swapped":
                parts.append(part)
        line = Text(" | ").join(parts)
        if line.cell_len <= self._space:
            return self._labelled("queues", line)
        return self._labelled("queues", Text("\n").join(parts))

    def _ids(self, names: list[str], space: int, glyphs: Glyphs) -> Text:
        """Request ids in their colours, as many as fit."""
        words = [fit(safe(name, glyphs), _MAX_ID_WIDTH, glyphs) for name in names]
        color_of = {word: self._color(name) for word, name in zip(words, names, strict=True)}
        shown = fit_list(words, space, glyphs)
        return Text(" ").join(Text(word, color_of.get(word, "")) for word in shown)

    def _labelled(self, label: str, text: Text) -> list[Text]:
        """The text beside its label, wrapped under itself."""
        lines = []
        for number, line in enumerate(text.wrap(self.console, self._space)):
            lines.append(Text())
            lines[-1].append(("" if number else label).ljust(_LABEL_WIDTH), "dim")
            lines[-1].append_text(line)
        return lines

    def _color(self, one: BatchRow | str) -> str:
        name = one if isinstance(one, str) else one.request_id
        return request_color(self._index.setdefault(name, len(self._index)))


def _width(cells: list[str]) -> int:
    return max(map(cell_len, cells))


def _token_cells(rows: list[BatchRow]) -> list[str]:
    """How many tokens, and which positions; a padding row computes for nobody."""
    counts = [f"+{row.num_new_tokens}" for row in rows]
    width = max(map(len, counts))
    cells = []
    for count, row in zip(counts, rows, strict=True):
        first, last = row.start, row.start + row.num_new_tokens - 1
        span = str(first) if first == last else f"{first}..{last}"
        cells.append(count if row.phase == "padding" else f"{count.ljust(width)} at {span}")
    return cells


def print_telling(
    records: list[StepRecord],
    console: Console | None = None,
    show_times: bool = True,
    max_rows: int = 16,
) -> None:
    """Print the telling steps of a trace, with a line for each gap between them."""
    sink = ConsoleSink(console, show_times, max_rows)
    gap = Glyphs.of(sink.console).gap
    before: StepRecord | None = None
    for record in telling_records(records):
        text = gap_text(before, record) if before else ""
        if text:
            sink.print_line(Text(f"{gap} {text} {gap}", "dim"))
            sink.print_line(Text())
        sink(record)
        before = record
