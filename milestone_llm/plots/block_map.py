"""Draws the block pool of one step in the terminal: who owns which block, and how full it is.

A small pool shows a cell a block, with its owner's id and a bar. A large one is condensed to one
letter a block, capital when the block is full; a huge one to one letter for several blocks.
"""

from __future__ import annotations

import math
import string
import textwrap
from collections import Counter
from collections.abc import Sequence

from rich.cells import cell_len
from rich.console import Console
from rich.text import Text

from milestone_llm.trace.text import Glyphs, fit, fit_list, id_ranges, pad, plural, safe

from .block_history import BlockState
from .style import request_color

_MAX_CELL_LINES = 16
_MAX_LETTER_LINES = 20
_BLOCKS_A_LINE = (64, 32, 16, 8, 4, 2, 1)
_MAX_NAME_WIDTH = 8
_OTHERS, _SHARED = "#", "*"


def print_block_map(state: BlockState, order: Sequence[str], console: Console) -> None:
    """Print the pool.

    Args:
        order: request ids in the order of their arrival in the whole trace; gives each its colour.
    """
    glyphs = Glyphs.of(console)
    colors = {name: request_color(index) for index, name in enumerate(order)}
    lines = [_headline(state)]
    cells = _cells(state, colors, console.width, glyphs)
    lines += cells or _letters(state, colors, console.width, glyphs)
    lines += _sharing(state, console.width, glyphs)
    for line in lines:
        line.truncate(console.width, overflow="crop")
        line.rstrip()
        console.print(line, soft_wrap=True)


def _headline(state: BlockState) -> Text:
    used = len(state.owners)
    text = f"blocks   {used:,} of {state.num_blocks:,} used, {state.num_free:,} free"
    text += f", {len(state.shared):,} shared" if state.shared else ""
    text += f"; {state.num_stored_tokens:,} tokens in {state.num_reserved_tokens:,} places"
    return Text(text, "bold")


def _cells(state: BlockState, colors: dict[str, str], width: int, glyphs: Glyphs) -> list[Text]:
    """One cell a block: owner and bar. Empty if that would take too many lines."""
    names = {block: _owner(owners, glyphs) for block, owners in state.owners.items()}
    name_width = max(map(cell_len, names.values()), default=2)
    label_width = len(str(state.num_blocks)) + 1
    for bar_width in (4, 3, 2):  # rather a shorter bar than fewer than 8 blocks in a line
        cell_width = name_width + bar_width + 1
        fitting = (width - label_width) // (cell_width + 2)
        if fitting >= min(8, state.num_blocks):
            break
    per_line = next((count for count in _BLOCKS_A_LINE[2:] if count <= fitting), 1)
    if state.num_blocks > per_line * _MAX_CELL_LINES:
        return []
    lines = []
    for first in range(0, state.num_blocks, per_line):
        line = Text(str(first).rjust(label_width), "dim")
        for block in range(first, min(first + per_line, state.num_blocks)):
            if block in names:
                color = colors.get(state.owners[block][0], "")
                bar = _bar(state.stored[block], state.block_size, bar_width, glyphs)
                line.append("  ").append(f"{pad(names[block], name_width)} {bar}", color)
            else:
                line.append("  " + "-".ljust(cell_width), "dim")
        lines.append(line)
    return lines


def _owner(owners: list[str], glyphs: Glyphs) -> str:
    """The first owner's id, and how many share the block with it."""
    name = fit(safe(owners[0], glyphs), _MAX_NAME_WIDTH, glyphs)
    return f"{name}+{len(owners) - 1}" if len(owners) > 1 else name


def _bar(stored: int, block_size: int, width: int, glyphs: Glyphs) -> str:
    """How full a block is. Only a full one looks full, and one token shows."""
    full = min(math.ceil(stored * width / block_size), width - (stored < block_size))
    return glyphs.bar[0] * full + glyphs.bar[2] * (width - full)


def _letters(state: BlockState, colors: dict[str, str], width: int, glyphs: Glyphs) -> list[Text]:
    """One letter a block, or one for several."""
    label_width = len(str(state.num_blocks)) + 1
    per_line = next((n for n in _BLOCKS_A_LINE if n <= width - label_width - 2), 1)
    scale = math.ceil(state.num_blocks / (per_line * _MAX_LETTER_LINES))
    letter_of = _letters_of(state)
    lines = []
    for first in range(0, state.num_blocks, per_line * scale):
        line = Text(str(first).rjust(label_width) + "  ", "dim")
        end = min(first + per_line * scale, state.num_blocks)
        for block in range(first, end, scale):
            letter, name = _letter(state, range(block, min(block + scale, end)), letter_of)
            line.append(letter, colors.get(name, "") if name else "dim")
        lines.append(line)
    what = "a letter is a block" if scale == 1 else f"a letter stands for {scale} blocks"
    what += f", a capital for a full one; {_SHARED} shared, - free"
    if len(letter_of) > len(string.ascii_lowercase):
        what += f", {_OTHERS} further requests"
    indent = label_width + 2
    lines += [Text(" " * indent + line, "dim") for line in textwrap.wrap(what, width - indent)]
    return lines + _key(state, letter_of, colors, glyphs, width - indent, indent)


def _letters_of(state: BlockState) -> dict[str, str]:
    """A letter for each request; those with the most blocks get one where letters run out."""
    counts = Counter(name for owners in state.owners.values() for name in owners)
    letters = list(string.ascii_lowercase)
    chosen = {name for name, _ in counts.most_common(len(letters))}
    return {name: letters.pop(0) if name in chosen else _OTHERS for name in counts}


def _letter(state: BlockState, blocks: range, letter_of: dict[str, str]) -> tuple[str, str]:
    """The sign of some neighbouring blocks, and the request that gives it its colour.

    Of several, the commonest owner counts; one block in use outweighs free ones, for a pool with
    something in it must not look empty.
    """
    used = [block for block in blocks if block in state.owners]
    if not used:
        return "-", ""
    name, _ = Counter(state.owners[block][0] for block in used).most_common(1)[0]
    if any(len(state.owners[block]) > 1 for block in used):
        return _SHARED, name
    is_full = all(state.stored[block] == state.block_size for block in used)
    is_full &= len(used) == len(blocks)
    return letter_of[name].upper() if is_full else letter_of[name], name


def _key(
    state: BlockState,
    letter_of: dict[str, str],
    colors: dict[str, str],
    glyphs: Glyphs,
    width: int,
    indent: int,
) -> list[Text]:
    """Which letter is whose, with the number of blocks, in columns."""
    counts = Counter(name for owners in state.owners.values() for name in owners)
    entries = [(name, letter) for name, letter in letter_of.items() if letter != _OTHERS]
    words = [
        f"{letter} {fit(safe(name, glyphs), _MAX_NAME_WIDTH, glyphs)} ({counts[name]})"
        for name, letter in entries
    ]
    column = max(map(cell_len, words), default=0) + 2
    per_line = max(1, width // column)
    lines = []
    for first in range(0, len(words), per_line):
        line = Text(" " * indent)
        for index in range(first, min(first + per_line, len(words))):
            line.append(pad(words[index], column), colors.get(entries[index][0], ""))
        lines.append(line)
    return lines


def _sharing(state: BlockState, width: int, glyphs: Glyphs) -> list[Text]:
    """All owners of the shared blocks, one line for each set of them."""
    groups: dict[tuple[str, ...], list[int]] = {}
    for block, owners in state.shared.items():
        groups.setdefault(tuple(owners), []).append(block)
    lines = []
    for names, blocks in groups.items():
        who = " ".join(safe(name, glyphs) for name in names)
        what = "block " if len(blocks) == 1 else "blocks "
        space = max(12, width - 9 - len(what) - len(who) - 9)
        ids = " ".join(fit_list(id_ranges(sorted(blocks)), space, glyphs))
        lines.append(Text(f"shared   {what}{ids} by {who}"))
    if lines:
        saved = sum(len(owners) - 1 for owners in state.shared.values())
        lines.append(Text(f"         {plural(saved, 'block')} saved by sharing", "dim"))
    return lines
