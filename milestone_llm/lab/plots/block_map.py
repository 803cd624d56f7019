"""Draws the block pool of one step in the terminal: whose each block is, and how full.

A small pool shows a cell a block, with its holder's id and a bar. A large one is condensed to one
letter a block, capital when the block is full; a huge one to one letter for several blocks.
"""

from __future__ import annotations

import math
import string
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from milestone_llm.lab.trace.colors import request_color
from milestone_llm.lab.trace.text import (
    Glyphs,
    Words,
    fill_bar,
    fit,
    id_ranges,
    plural,
    print_lines,
    safe,
)

from .block_history import BlockState

_MAX_CELL_LINES = 16
_MAX_LETTER_LINES = 20
_MAX_NAME_WIDTH = 8
_OTHERS, _SHARED = "#", "*"

Colors = Mapping[str, str]


def print_block_map(state: BlockState, order: Sequence[str], console: Console) -> None:
    """Print the pool.

    Args:
        order: request ids in the order of their arrival in the whole trace; gives each its colour.
    """
    glyphs = Glyphs.of(console)
    colors = defaultdict(str, {name: request_color(index) for index, name in enumerate(order)})
    text = f"blocks   {len(state.holders):,} of {state.num_blocks:,} used, {state.num_free:,} free"
    text += f", {len(state.shared):,} shared" if state.shared else ""
    places = plural(state.num_reserved_tokens, "place")
    text += f"; {plural(state.num_stored_tokens, 'token')} in {places}"
    width = console.width
    pool = _cells(state, colors, width, glyphs) or _letters(state, colors, width, glyphs)
    print_lines(console, Group(Text(text, "bold"), pool, *_sharing(state, glyphs)))


def _cells(state: BlockState, colors: Colors, width: int, glyphs: Glyphs) -> RenderableType | None:
    """One cell a block: holder and bar. None if that would take too many lines."""
    names = {block: _holder(own, glyphs) for block, own in state.holders.items()}
    name_width = max((Text(name).cell_len for name in names.values()), default=2)
    num_first = len(str(state.num_blocks)) + 1
    for bar_width in (4, 3, 2):  # rather a shorter bar than fewer than 8 blocks in a line
        fitting = (width - num_first) // (name_width + bar_width + 3)
        if fitting >= min(8, state.num_blocks):
            break
    per_line = _power_of_two(min(fitting, 16))
    if state.num_blocks > per_line * _MAX_CELL_LINES:
        return None
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style="dim", width=num_first)
    for first in range(0, state.num_blocks, per_line):
        cells = []
        for block in range(first, min(first + per_line, state.num_blocks)):
            cell = Text("-".ljust(name_width + bar_width + 1), "dim")
            if block in names:
                bar = fill_bar(state.stored[block], state.block_size, bar_width, glyphs)
                cell = Text(names[block], colors[state.holders[block][0]])
                cell.pad_right(name_width - cell.cell_len + 1)
                cell.append(bar)
            cells.append(cell)
        grid.add_row(str(first), *cells)
    return grid


def _power_of_two(most: int) -> int:
    """The largest that is not above `most`: lines then begin with numbers easy to add to."""
    return 1 << max(0, most.bit_length() - 1)


def _holder(holders: Sequence[str], glyphs: Glyphs) -> str:
    """The first holder's id, and how many share the block with it."""
    name = fit(safe(holders[0], glyphs), _MAX_NAME_WIDTH, glyphs)
    return f"{name}+{len(holders) - 1}" if len(holders) > 1 else name


def _letters(state: BlockState, colors: Colors, width: int, glyphs: Glyphs) -> RenderableType:
    """One letter a block, or one for several; below, which letter is whose."""
    num_first = len(str(state.num_blocks)) + 1
    per_line = _power_of_two(min(width - num_first - 2, 64))
    scale = math.ceil(state.num_blocks / (per_line * _MAX_LETTER_LINES))
    counts = Counter(name for holders in state.holders.values() for name in holders)
    letters = iter(string.ascii_lowercase)  # for those with the most blocks, where they run out
    most = {name for name, _ in counts.most_common(len(string.ascii_lowercase))}
    letter_of = {name: next(letters) if name in most else _OTHERS for name in counts}
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style="dim", width=num_first)
    for first in range(0, state.num_blocks, per_line * scale):
        line = Text()
        end = min(first + per_line * scale, state.num_blocks)
        for block in range(first, end, scale):
            letter, name = _letter(state, range(block, min(block + scale, end)), letter_of)
            line.append(letter, colors[name] if name else "dim")
        grid.add_row(str(first), line)
    legend = "a letter is a block" if scale == 1 else f"a letter stands for {scale} blocks"
    legend += f", a capital for a full one; {_SHARED} shared, - free"
    legend += f", {_OTHERS} further requests" if _OTHERS in letter_of.values() else ""
    grid.add_row("", Text(legend, "dim"))
    keys = [
        Text(f"{letter} {_holder([name], glyphs)} ({counts[name]})", colors[name])
        for name, letter in letter_of.items()
        if letter != _OTHERS
    ]
    grid.add_row("", Columns(keys, padding=(0, 2), equal=True))
    return grid


def _letter(state: BlockState, blocks: range, letter_of: Mapping[str, str]) -> tuple[str, str]:
    """The sign of some neighbouring blocks, and the request that gives it its colour.

    Of several, the commonest holder counts; one block in use outweighs free ones, for a pool with
    something in it must not look empty.
    """
    used = [block for block in blocks if block in state.holders]
    if not used:
        return "-", ""
    ((name, _),) = Counter(state.holders[block][0] for block in used).most_common(1)
    if any(len(state.holders[block]) > 1 for block in used):
        return _SHARED, name
    is_full = all(state.stored.get(block) == state.block_size for block in blocks)
    return letter_of[name].upper() if is_full else letter_of[name], name


def _sharing(state: BlockState, glyphs: Glyphs) -> Iterator[RenderableType]:
    """All holders of the shared blocks, one line for each set of them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for block, holders in state.shared.items():
        groups.setdefault(tuple(holders), []).append(block)
    for names, blocks in groups.items():
        lead = "shared   block " if len(blocks) == 1 else "shared   blocks "
        by = " by " + " ".join(safe(name, glyphs) for name in names)
        yield Words(id_ranges(sorted(blocks)), glyphs, lead, by)
    if groups:
        saved = sum(len(holders) - 1 for holders in state.shared.values())
        yield Padding(Text(f"{plural(saved, 'block')} saved by sharing", "dim"), (0, 0, 0, 9))
