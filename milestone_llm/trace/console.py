"""Print `StepRecord`s for people: one compact table for each step, in a terminal or a plain log.

Words and glyphs have the meaning; colour only helps. Rich fits columns to the width; this module
decides which columns are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby

from rich.console import Console, Group, JustifyMethod, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from milestone_llm.core.kv import NULL_BLOCK

from .records import BatchRow, StepEvent, StepRecord, step_events, steps_with_changes
from .text import (
    GAP,
    Words,
    fit,
    id_ranges,
    kv_text,
    plural,
    print_lines,
    request_color,
    safe,
    size_bar,
    token_text,
)

_LABEL_WIDTH = 10
_INDENT = 3
_MAX_ID_WIDTH = 16
_MAX_ROWS = 16
"""Most rows of a batch that are printed; the others are summed up in one line."""
_COLUMNS = (
    "who",
    "phase",
    "tokens",
    "guessed",
    "allowed",
    "positions",
    "context",
    "sampled",
    "text",
    "cached",
    "region",
    "blocks",
)
_DROP_ORDER = (
    "positions",
    "text",
    "sampled",
    "region",
    "blocks",
    "cached",
    "context",
    "allowed",
    "guessed",
    "tokens",
)
"""Columns to leave out first on a narrow console: rich makes columns narrower, but never fewer."""
_NUMBERS = ("tokens", "guessed", "allowed", "context", "sampled", "cached", "region")
_STYLE = {"prefill": "bold", "decode": "", "padding": "dim"}
_SIGN = {"prefill": "▸", "decode": "•", "padding": "░"}
_NONE = Text("-")
_COMING = ("admitted", "share", "alloc")


class ConsoleSink:
    """A tracer sink that prints each record.

    Args:
        console: where to print; None: standard output.
        show_times: print the milliseconds of each step. Without them, the same work prints the
            same text.
        decode: returns the text of token ids; with it, sampled tokens are printed with their text.
    """

    def __init__(
        self,
        console: Console | None = None,
        show_times: bool = True,
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        self.console = console or Console(emoji=False)
        self.show_times = show_times
        self.decode = decode
        self._index: dict[str, int] = {}
        self._batch_sizes: list[int] = []

    def __call__(self, record: StepRecord) -> None:
        """Print one record. After the last one of a run, print its batch sizes."""
        self.print_step(record)
        self._batch_sizes.append(len(record.batch))
        if not (record.running or record.waiting or record.swapped):
            self.print_batch_sizes(self._batch_sizes)
            self._batch_sizes = []

    def print_batch_sizes(self, sizes: Sequence[int]) -> None:
        """Print the rows of each step as one character (or of a few steps); nothing for a single
        step."""
        if len(sizes) > 1:
            bar, scale = size_bar(sizes, self.console.width - _LABEL_WIDTH)
            first = Text("rows".ljust(_LABEL_WIDTH), "dim").append(bar, "not dim")
            print_lines(self.console, Group(first, Text(f"{'':{_LABEL_WIDTH}}{scale}\n", "dim")))

    def print_step(self, record: StepRecord) -> None:
        """Print one record."""
        batch = Padding(self._batch(record), (0, 0, 0, _INDENT))
        facts = Table.grid()
        facts.add_column(width=_LABEL_WIDTH, style="dim")
        facts.add_column(overflow="fold")
        for label, fact in self._facts(record):
            facts.add_row(label, Text(fact) if isinstance(fact, str) else fact)
        print_lines(self.console, Group(self._header(record), batch, facts, ""))

    def _header(self, record: StepRecord) -> RenderableType:
        counts = {
            "prefill": record.num_prefill_tokens,
            "decode": record.num_decode_tokens,
            "padding": record.num_padding_tokens,
        }
        totals = " + ".join(f"{count:,} {name}" for name, count in counts.items() if count) or "0"
        totals += " token" if sum(counts.values()) == 1 else " tokens"
        if record.num_padding_tokens:
            totals += f" ({1 - record.num_padding_tokens / sum(counts.values()):.0%} useful)"
        line = Text(f"── step {record.step}  {record.milestone}  ", "bold")
        line.append(totals, "not bold")
        is_cut = line.cell_len + 2 > self.console.width  # a rule would cut it, numbers too
        return line if is_cut else Rule(line, align="left", style="dim")

    def _batch(self, record: StepRecord) -> RenderableType:
        """Return the table of rows, with one line for the rows that do not fit."""
        rows, rest = record.batch[:_MAX_ROWS], record.batch[_MAX_ROWS:]
        if not rows:
            return Text("nothing to compute")
        cells = [self._cells(row, record.kv.unit) for row in rows]
        columns = {name: [own.get(name, _NONE) for own in cells] for name in _COLUMNS}
        widths = {
            name: max(len(name), *(cell.cell_len for cell in column))
            for name, column in columns.items()
            if any(name in own for own in cells)
        }
        for name in _DROP_ORDER:
            if sum(width + 2 for width in widths.values()) - 2 > self.console.width - _INDENT:
                widths.pop(name, None)
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        for name in widths:
            justify: JustifyMethod = "right" if name in _NUMBERS else "left"
            table.add_column(name, justify=justify, no_wrap=name != "blocks", overflow="crop")
        for index, row in enumerate(rows):
            table.add_row(*(columns[name][index] for name in widths), style=_STYLE[row.phase])
        if not rest:
            return table
        parts = []
        for phase, count in Counter(row.phase for row in rest).items():
            tokens = sum(row.num_new_tokens for row in rest if row.phase == phase)
            parts.append(f"{count} {phase} (+{tokens:,})")
        more = f"{GAP} {plural(len(rest), 'more row')}: {', '.join(parts)}"
        return Group(table, Text(more))

    def _cells(self, row: BatchRow, unit: str) -> dict[str, Text | Words]:
        """Return the texts of a row, by column."""
        cells: dict[str, Text | Words] = {
            "who": self._name(row.request_id),
            "phase": Text(f"{_SIGN[row.phase]} {row.phase}"),
            "tokens": Text(f"+{row.num_new_tokens}"),
        }
        if row.num_draft_tokens:
            cells["guessed"] = Text(f"{row.num_accepted_tokens} of {row.num_draft_tokens}")
        if row.num_allowed_tokens:
            cells["allowed"] = Text(f"{row.num_allowed_tokens:,}")
        if row.phase != "padding":  # padding belongs to no position
            last = f"..{row.end - 1}" if row.num_new_tokens > 1 else ""
            cells |= {"positions": Text(f"{row.start}{last}"), "context": Text(str(row.end))}
        if row.sampled_token is not None:
            cells["sampled"] = Text(str(row.sampled_token))
            if self.decode is not None:
                text = safe(repr(token_text(self.decode, row.sampled_token)))
                cells["text"] = Text(fit(text, _MAX_ID_WIDTH))
        if row.num_cached_tokens:
            cells["cached"] = Text(str(row.num_cached_tokens))
        if row.blocks:
            words: list[str | Text] = []
            for table in (row.blocks, *row.further_blocks):
                num_gone = table.count(NULL_BLOCK)
                words += ["|", *([f"({num_gone} back)"] if num_gone else [])]
                words += id_ranges([block for block in table if block != NULL_BLOCK])
            cells["region" if unit == "region" else "blocks"] = Words(words[1:])
        return cells

    def _facts(self, record: StepRecord) -> Iterator[tuple[str, str | Text | Words]]:
        """Yield the events in their order, then the state after the step."""
        events, gone = _together(step_events(record)), set[str | None]()
        for (kind, reason), some in groupby(events, lambda each: (each.kind, each.reason)):
            group = list(some)
            if group[0].blocks:
                gone |= {each.request_id for each in group if kind == "release"}
                tail = self._holders(group, gone, record) if kind == "release" else ""
                yield "kv", self._blocks(group, record.kv.unit, tail)
            else:
                tail = f": {safe(reason)}" if reason else ""
                yield kind, self._names([str(each.request_id) for each in group], tail=tail)
        queues = [
            self._names(names, lead=f"{name} {len(names)}" + (": " if names else ""))
            for name in ("waiting", "running", "swapped")
            if (names := getattr(record, name)) or name != "swapped"
        ]
        space = self.console.width - _LABEL_WIDTH
        in_one = Text(" | ").join(queue.line() for queue in queues)
        is_short = in_one.cell_len <= space
        yield from zip(("queues", "", ""), [in_one] if is_short else queues, strict=False)
        for name, reason in record.waiting_reasons.items():
            yield "waits", self._names([name], tail=f": {safe(reason)}")
        yield from zip(("kv", ""), kv_text(record.kv, space), strict=False)
        if load := record.expert_load:
            text = f"{load['num_met']:.1f} of {load['num_experts']} met in a layer, on average; "
            yield "experts", f"{text}the largest share is {load['largest_share']:.1%}"
        if self.show_times:
            times = (
                f"schedule {record.schedule_ms:.1f} ms, execute {record.execute_ms:.1f} ms, "
                f"update {record.update_ms:.1f} ms, began at {record.start_s:.3f} s"
            )
            yield "time", Text(times, "dim")

    def _blocks(self, group: list[StepEvent], unit: str, tail: str) -> Words:
        """Return one line for events of the same kind: their blocks, and whose they are."""
        words: list[str | Text] = []
        for each in group:
            words += id_ranges(each.blocks)
            if each.request_id is not None:
                words[-1] = self._name(each.request_id, f"{words[-1]} ({{}})")
        count = plural(sum(len(each.blocks) for each in group), unit)
        if group[0].kind == "copy_on_write":
            count = plural(len(group), "copy")
        return Words(words, f"{group[0].kind} {count}: ", tail)

    def _holders(self, group: list[StepEvent], gone: set[str | None], record: StepRecord) -> str:
        """Return which requests, except `gone`, still hold these blocks. A request that did not
        compute is not in the record."""
        blocks = {block for each in group for block in each.blocks}
        rows = [row for row in record.batch if blocks.intersection(row.held)]
        names = [safe(row.request_id) for row in rows if row.request_id not in gone]
        return f", still held by {' '.join(names) or 'others'}"

    def _names(self, names: list[str], lead: str = "", tail: str = "") -> Words:
        return Words([self._name(name) for name in names], lead, tail)

    def _name(self, name: str, form: str = "{}") -> Text:
        """Return a request's id in its colour."""
        color = request_color(self._index.setdefault(name, len(self._index)))
        return Text(form.format(fit(safe(name), _MAX_ID_WIDTH)), color)


def _together(events: Iterable[StepEvent]) -> Iterator[StepEvent]:
    """Sort consecutive arrivals: the requests in one line, and their blocks in another."""
    for is_coming, group in groupby(events, lambda each: each.kind in _COMING):
        some = list(group)
        if is_coming:
            some.sort(key=lambda each: _COMING.index(each.kind))
        yield from some


def print_changes(records: list[StepRecord], sink: ConsoleSink | None = None) -> None:
    """Print the steps of a trace in which something changed, with a line for each gap."""
    sink = sink or ConsoleSink()
    before = None
    for record in steps_with_changes(records):
        if before and (count := record.step - before.step - 1) > 0:
            text = f"{GAP} {plural(count, 'step')} like step {before.step} {GAP}\n"
            print_lines(sink.console, Text(text, "dim"))
        sink.print_step(record)
        before = record
    sink.print_batch_sizes([len(record.batch) for record in records])
