"""Print each step in one line as it happens: a column for each request."""

from __future__ import annotations

from typing import Any

from rich.text import Text

from milestone_llm.consoles import console
from milestone_llm.trace.records import BatchRow, StepRecord
from milestone_llm.trace.text import fit, request_color, safe, token_text

_WIDTH = 14


class StepLines:
    """A tracer sink. A column is a request, in the order of arrival, and has its tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self.console = console  # a demo counts no tokens where steps are printed
        self._decode = tokenizer and tokenizer.decode
        self._names: list[str] = []

    def __call__(self, record: StepRecord) -> None:
        """Print one step."""
        rows = {row.request_id: row for row in record.batch}
        if not self._names:
            heads = [Text(name, request_color(i)) for i, name in enumerate(record.arrived)]
            self._print("step", heads, "kv")
        self._names += record.arrived
        done = {ended["request_id"]: ended["reason"] for ended in record.finished}
        preempted = {ended["request_id"] for ended in record.preempted}
        cells = []
        for index, name in enumerate(self._names):
            cell = Text(style=request_color(index))
            if name in rows:
                cell.append(self._row(rows[name], done.get(name, "")))
            elif name in preempted:
                cell.append("preempted", "bold")
            elif name in record.waiting:
                cell.append("waits", "dim")
            cells.append(cell)
        kv = record.kv
        used = f"{kv.reserved_tokens:,} tokens" if kv.unit == "token" else f"{kv.used}/{kv.total}"
        self._print(str(record.step), cells, used if kv.unit == "token" else f"{used} {kv.unit}s")

    def _row(self, row: BatchRow, ended_by: str) -> str:
        """Return what a row computed and sampled. The token that ends a text is not shown."""
        if row.phase == "padding":
            return "░░░"
        words = ""
        if row.phase == "prefill":
            found = f"+{row.num_cached_tokens}" if row.num_cached_tokens else ""
            words = f"▸{row.num_new_tokens}{found} "
        if ended_by == "stop" or row.sampled_token is None:
            return f"{words}{'■' if ended_by else ''}"
        text = token_text(self._decode, row.sampled_token) if self._decode else ""
        text = safe(text) or str(row.sampled_token)
        return f"{words}{text.lstrip() if words else text}{' ■' if ended_by else ''}"

    def _print(self, step: str, cells: list[Text], used: str) -> None:
        line = Text(f"{step:>4}  ")
        for cell in cells:
            cell.plain = fit(cell.plain, _WIDTH - 1)
            cell.pad_right(_WIDTH - cell.cell_len)
            line.append_text(cell)
        line.append(used, "dim")
        console.print(line, soft_wrap=True)
