"""Small pieces of text for the trace table: glyphs, and lists that fit into a given width.

Widths are in terminal cells, so that an id in Chinese does not push the columns apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Console

from milestone_llm.engine.kv import KVUsage


@dataclass(frozen=True)
class Glyphs:
    """The signs a console can show: Unicode, or ASCII where the encoding knows no more."""

    ascii_only: bool = False

    @classmethod
    def of(cls, console: Console) -> Glyphs:
        """The signs for this console's encoding."""
        return cls(console.options.ascii_only)

    @property
    def phase(self) -> dict[str, str]:
        """One sign per phase; each is followed by the word."""
        signs = (">", "*", "x") if self.ascii_only else ("▸", "•", "░")
        return dict(zip(("prefill", "decode", "padding"), signs, strict=True))

    @property
    def rule(self) -> str:
        """The line that begins a step."""
        return "-" if self.ascii_only else "─"

    @property
    def gap(self) -> str:
        """Something is left out here."""
        return "..." if self.ascii_only else "…"

    @property
    def bar(self) -> tuple[str, str, str]:
        """Used, cached, free."""
        return ("#", "+", ".") if self.ascii_only else ("█", "▒", "░")


def safe(text: str, glyphs: Glyphs) -> str:
    """A user's text without control characters, in the console's characters."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return text.encode("ascii", "backslashreplace").decode() if glyphs.ascii_only else text


def pad(text: str, width: int, is_number: bool = False) -> str:
    """`text` filled with spaces to `width` cells; numbers stand on the right."""
    spaces = " " * (width - cell_len(text))
    return spaces + text if is_number else text + spaces


def fit(text: str, width: int, glyphs: Glyphs) -> str:
    """`text`, or its two ends, in at most `width` cells."""
    if cell_len(text) <= width:
        return text
    head = (width - cell_len(glyphs.gap)) // 2
    tail = ""
    for letter in reversed(text):
        if cell_len(letter + tail) > width - cell_len(glyphs.gap) - head:
            break
        tail = letter + tail
    return set_cell_size(text, head).rstrip() + glyphs.gap + tail


def fit_list(words: list[str], width: int, glyphs: Glyphs) -> list[str]:
    """The words, or the first ones, a gap and the last, in about `width` cells.

    >>> fit_list([str(number) for number in range(90)], 14, Glyphs(ascii_only=True))
    ['0', '1', '2', '3', '...', '89']
    """
    if cell_len(" ".join(words)) <= width:
        return words
    end = [glyphs.gap, words[-1]]
    shown: list[str] = []
    for word in words:
        if cell_len(" ".join([*shown, word, *end])) > width:
            break
        shown.append(word)
    return shown + end


def id_ranges(ids: list[int]) -> list[str]:
    """Ids in their order, three or more consecutive ones as a range.

    >>> id_ranges([4, 5, 6, 7, 12, 9, 10])
    ['4-7', '12', '9', '10']
    """
    runs: list[list[int]] = []
    for number in ids:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = []
    for run in runs:
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return words


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `1,200 copies`."""
    if count != 1:
        noun = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count:,} {noun}"


def kv_text(kv: KVUsage, width: int, glyphs: Glyphs) -> list[str]:
    """How full the KV cache is: a bar with units (m1_single has no pool), then tokens."""
    tokens = f"{kv.stored_tokens:,} tokens stored, {kv.reserved_tokens:,} reserved"
    if kv.reserved_tokens:
        wasted = max(0, kv.reserved_tokens - kv.stored_tokens) / kv.reserved_tokens
        tokens += f" ({wasted:.1%} of it empty)"
    if kv.unit == "token":
        return [tokens]
    units = f"{kv.used:,} of {plural(kv.total, kv.unit)} used, {kv.free:,} free"
    units += f" ({kv.cached:,} cached)" if kv.cached else ""
    bar_width = min(24, width - len(units) - 3)
    if kv.total and bar_width >= 6:
        units = f"[{_bar(kv, bar_width, glyphs)}] {units}"
    return [units, tokens]


def _bar(kv: KVUsage, width: int, glyphs: Glyphs) -> str:
    """Rounded up, so that little is not nothing, and rounded down at the full end."""
    used = min(-(-kv.used * width // kv.total), width - (kv.free > 0))
    cached = min(-(-kv.cached * width // kv.total), width - used)
    signs = glyphs.bar
    return signs[0] * used + signs[1] * cached + signs[2] * (width - used - cached)
