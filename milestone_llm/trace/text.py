"""Small pieces of text and the colours of requests, where rich has none of its own.

Rich cuts off the end of what does not fit. Here an id keeps both ends, for what tells ids apart is
often at the end, and a list of blocks keeps its last one, which is the one being written.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

from rich.cells import cell_len, set_cell_size
from rich.color import Color, blend_rgb
from rich.color_triplet import ColorTriplet
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.measure import Measurement
from rich.text import Text

from milestone_llm.core.kv import KVUsage

GAP = "…"
"""Something is left out here."""
BAR = "█▒░"
"""Used, cached, free."""
HEIGHTS = " ▁▂▃▄▅▆▇█"
"""None, then a little, up to all."""
_IN_ASCII = str.maketrans("…█▒░▇▆▅▄▃▂▁▸•─", "~#+.%*+=-:.>*-")


@dataclass(frozen=True)
class Words:
    """Words in one line of a table: as many as its column has room for, and the last.

    >>> Words([str(number) for number in range(90)]).line(14).plain
    '0 1 2 3 4 … 89'
    """

    words: Sequence[str | Text]
    lead: str = ""
    tail: str = ""

    def line(self, width: int = 1 << 20) -> Text:
        """The words in about `width` cells; a long `tail` wraps before they are left out."""
        words = [Text(word) if isinstance(word, str) else word for word in self.words]
        sizes = [word.cell_len + 1 for word in words]
        space = max(8, width - cell_len(self.lead + self.tail))
        if sum(sizes) - 1 > space and len(words) > 1:
            space -= cell_len(GAP) + sizes[-1]
            count = bisect_right([*accumulate(sizes)], space)
            words[count:-1] = [Text(GAP)]
        return Text(self.lead).append_text(Text(" ").join(words)).append(self.tail)

    @property
    def cell_len(self) -> int:
        """Cells that it can make do with: 10, if the words need as many."""
        return min(10, self.line().cell_len)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Tells rich how narrow it may become, so that a table shrinks it before other columns."""
        return Measurement(self.cell_len, self.line().cell_len)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """The line for the width that the table gives."""
        yield self.line(options.max_width)


_HUES = ["#1b7fc4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#a6761d"]
"""Okabe and Ito's colour-blind-safe set, for dark and light terminals alike: its blue is a little
lighter here, purple and brown stand for its yellow and black."""

_WHITE, _BLACK = ColorTriplet(255, 255, 255), ColorTriplet(0, 0, 0)


def request_color(index: int) -> str:
    """The colour of the `index`-th request (0 is the first to appear) as `#rrggbb`, everywhere.

    Eight hues, then the same hues lighter and darker; after 24 requests they repeat.
    """
    hue = Color.parse(_HUES[index % len(_HUES)]).get_truecolor()
    target, share = ((_BLACK, 0.0), (_WHITE, 0.45), (_BLACK, 0.35))[index // len(_HUES) % 3]
    return blend_rgb(hue, target, share).hex


def fit(text: str, width: int) -> str:
    """`text`, or its two ends, in at most `width` cells."""
    if cell_len(text) <= width:
        return text
    space = max(0, width - cell_len(GAP))
    ends = (text[first:] for first in range(len(text) + 1))
    tail = next(end for end in ends if cell_len(end) <= space - space // 2)
    return set_cell_size(text, space // 2).rstrip() + GAP + tail


def token_text(decode: Callable[[list[int]], str], token_id: int) -> str:
    """Text of one token; none of an id that the tokenizer does not know."""
    try:
        return decode([token_id])
    except Exception:
        return ""


def safe(text: str) -> str:
    """A user's text without control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def id_ranges(ids: Sequence[int]) -> list[str]:
    """Ids in their order, three or more consecutive ones as a range.

    >>> id_ranges([4, 5, 6, 7, 12, 9, 10])
    ['4-7', '12', '9', '10']
    """
    words: list[str] = []
    for _, group in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return words


def plural(count: int, noun: str) -> str:
    """`1 block`, `2 blocks`, `1,200 copies`."""
    if count != 1:
        noun = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count:,} {noun}"


def fill_bar(used: int, total: int, width: int, cached: int = 0) -> str:
    """How full something is: rounded up, so that little is not nothing; only full looks full."""
    used_cells = min(-(-used * width // total), width - (used < total))
    cached_cells = min(-(-cached * width // total), width - used_cells)
    return (BAR[0] * used_cells + BAR[1] * cached_cells).ljust(width, BAR[2])


def size_bar(sizes: Sequence[int], width: int) -> tuple[str, str]:
    """Batch sizes over time, one character for a step or for as many as must share one.

    Up to nine rows the characters are digits, else heights; steps that share one show their mean.

    Returns:
        The characters, and what they stand for.
    """
    num_steps = -(-len(sizes) // width)
    parts = [sizes[first : first + num_steps] for first in range(0, len(sizes), num_steps)]
    means, most = [sum(part) / len(part) for part in parts], max(1, *sizes)
    share = "one step" if num_steps == 1 else f"the mean of {num_steps} steps"
    if most <= 9:
        return "".join(str(round(mean)) for mean in means), f"rows of the batch; a digit is {share}"
    top = len(HEIGHTS) - 1
    bar = "".join(HEIGHTS[-int(-mean * top // most)] for mean in means)
    return bar, f"rows of the batch, {HEIGHTS[-1]} is {most:,}; a character is {share}"


def kv_text(kv: KVUsage, width: int) -> list[str]:
    """How full the KV cache is: a bar with units (m1_single has no pool), then tokens."""
    tokens = f"{plural(kv.stored_tokens, 'token')} stored, {kv.reserved_tokens:,} reserved"
    if kv.reserved_tokens:
        empty = max(0, kv.reserved_tokens - kv.stored_tokens) / kv.reserved_tokens
        tokens += f" ({empty:.1%} empty)"
    if kv.unit == "token":
        return [tokens]
    units = f"{kv.used:,} of {plural(kv.total, kv.unit)} used, {kv.free:,} free"
    units += f" ({kv.cached:,} cached)" if kv.cached else ""
    bar_width = min(24, width - len(units) - 3)
    if kv.total and bar_width >= 6:
        units = f"[{fill_bar(kv.used, kv.total, bar_width, kv.cached)}] {units}"
    return [units, tokens]


def print_lines(console: Console, content: RenderableType) -> None:
    """Print without the spaces with which rich fills lines up: a log or a page would keep them.

    Where the encoding knows no more than ASCII, each sign becomes one that it knows.
    """
    for segments in console.render_lines(content, pad=False):
        line = Text.assemble(*((part.text, part.style or "") for part in segments))
        if console.options.ascii_only:
            line.plain = line.plain.translate(_IN_ASCII).encode("ascii", "replace").decode()
        line.rstrip()
        console.print(line, soft_wrap=True)
