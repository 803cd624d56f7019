"""Short texts, and the colours of requests, where rich has no function for them.

Rich cuts off the end of a text that is too long. Here an id keeps both ends, because ids often
differ only at the end. A list of blocks keeps its last one, which is being written.
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
"""From none to all."""
_IN_ASCII = str.maketrans("…█▒░▇▆▅▄▃▂▁▸•─", "~#+.%*+=-:.>*-")


@dataclass(frozen=True)
class Words:
    """Words in one line of a table: as many as fit into its column, and the last one.

    >>> Words([str(number) for number in range(90)]).line(14).plain
    '0 1 2 3 4 … 89'
    """

    words: Sequence[str | Text]
    lead: str = ""
    tail: str = ""

    def line(self, width: int = 1 << 20) -> Text:
        """Return the words in about `width` cells. A long `tail` is wrapped before words are left
        out."""
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
        """The least cells that it needs: at most 10."""
        return min(10, self.line().cell_len)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Tell rich the smallest width, so that a table shrinks this column before others."""
        return Measurement(self.cell_len, self.line().cell_len)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the line in the width of the table."""
        yield self.line(options.max_width)


_HUES = ["#1b7fc4", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#a6761d"]
"""Okabe and Ito's colour-blind-safe set, for dark and light terminals: its blue is a little lighter
here, and purple and brown replace its yellow and black."""

_WHITE, _BLACK = ColorTriplet(255, 255, 255), ColorTriplet(0, 0, 0)


def request_color(index: int) -> str:
    """Return the colour of the `index`-th request (0 appears first) as `#rrggbb`, for all outputs.

    Eight hues, then the same hues lighter and darker; after 24 requests they repeat.
    """
    hue = Color.parse(_HUES[index % len(_HUES)]).get_truecolor()
    target, share = ((_BLACK, 0.0), (_WHITE, 0.45), (_BLACK, 0.35))[index // len(_HUES) % 3]
    return blend_rgb(hue, target, share).hex


def fit(text: str, width: int) -> str:
    """Return `text`, or its two ends, in at most `width` cells."""
    if cell_len(text) <= width:
        return text
    space = max(0, width - cell_len(GAP))
    ends = (text[first:] for first in range(len(text) + 1))
    tail = next(end for end in ends if cell_len(end) <= space - space // 2)
    return set_cell_size(text, space // 2).rstrip() + GAP + tail


def token_text(decode: Callable[[list[int]], str], token_id: int) -> str:
    """Return the text of one token; empty for an id that the tokenizer does not know."""
    try:
        return decode([token_id])
    except Exception:
        return ""


def safe(text: str) -> str:
    """Return a user's text without control characters."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def id_ranges(ids: Sequence[int]) -> list[str]:
    """Return ids in their order, three or more consecutive ones as a range.

    >>> id_ranges([4, 5, 6, 7, 12, 9, 10])
    ['4-7', '12', '9', '10']
    """
    words: list[str] = []
    for _, group in groupby(enumerate(ids), lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        words += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(number) for number in run]
    return words


def plural(count: int, noun: str) -> str:
    """Return `1 block`, `2 blocks`, `1,200 copies`."""
    if count != 1:
        noun = noun[:-1] + "ies" if noun.endswith("y") else noun + "s"
    return f"{count:,} {noun}"


def fill_bar(used: int, total: int, width: int, cached: int = 0) -> str:
    """Return a bar. Counts are rounded up, so that a little is visible; only full looks full."""
    used_cells = min(-(-used * width // total), width - (used < total))
    cached_cells = min(-(-cached * width // total), width - used_cells)
    return (BAR[0] * used_cells + BAR[1] * cached_cells).ljust(width, BAR[2])


def size_bar(sizes: Sequence[int], width: int) -> tuple[str, str]:
    """Draw batch sizes over time, one character for a step or for several steps.

    Up to nine rows the characters are digits, otherwise heights. Several steps show their mean.

    Returns:
        The characters, and an explanation.
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
    """Return how full the KV cache is: a bar with units (m1_single has no pool), then tokens."""
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
    """Print without the spaces that rich adds at line ends: a log or a page would keep them.

    If the encoding is ASCII, signs are replaced by ASCII characters.
    """
    for segments in console.render_lines(content, pad=False):
        line = Text.assemble(*((part.text, part.style or "") for part in segments))
        if console.options.ascii_only:
            line.plain = line.plain.translate(_IN_ASCII).encode("ascii", "replace").decode()
        line.rstrip()
        console.print(line, soft_wrap=True)
