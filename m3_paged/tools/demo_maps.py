"""The demo's maps of the block pool, and a summary of the run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from milestone_llm.consoles import console
from milestone_llm.lab.bench.report import print_rows
from milestone_llm.lab.demo import show
from milestone_llm.lab.demo.work import DemoRun
from milestone_llm.lab.explorer.kv_figures import kv_figures
from milestone_llm.lab.explorer.spans import arrival_order
from milestone_llm.lab.plots.block_history import BlockState, block_history
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.text import (
    GAP,
    fill_bar,
    fit,
    plural,
    print_lines,
    request_color,
    safe,
)

_BAR_WIDTH = 4
_MAX_LINES = 16
_MAX_NAME_WIDTH = 8


def steps_to_map(records: Sequence[StepRecord]) -> dict[int, str]:
    """Return the index of each record that is worth a map, and what to look at there."""
    preempted = _first(bool(record.preempted) for record in records)
    fullest = max(range(len(records)), key=lambda index: records[index].kv.used)
    found = {0: "The first step"}
    copied = _first(any(e.type == "copy_on_write" for e in record.events) for record in records)
    for index, text in (
        (copied, "Copy-on-write: a sharer writes into a shared block and gets its own"),
        (preempted and preempted - 1, "The pool is as good as full"),
        (preempted, "A preemption: a block is needed and none is free"),
        (
            _first(bool(each.resumed) for each in records),
            "A resumption: the preempted request is back",
        ),
        (None if preempted else fullest, "The pool at its fullest"),
    ):
        if index is not None:
            found.setdefault(index, text)
    return dict(sorted(found.items()))


def _first(conditions: Iterable[bool]) -> int | None:
    return next((index for index, is_so in enumerate(conditions) if is_so), None)


def print_maps(run: DemoRun) -> None:
    """Print the steps that matter: what was computed, and whose each block was meanwhile."""
    states, order = list(block_history(run.records)), arrival_order(run.records)
    for index, text in steps_to_map(run.records).items():
        show.step(run, run.records[index], text)
        print_block_map(states[index], order, console)


def print_block_map(state: BlockState, order: Sequence[str], console: Console) -> None:
    """Print whose each block is, and how full: a cell a block.

    Args:
        order: request ids in the order of arrival in the whole trace. The order decides colours.
    """
    num_used = len(state.holders)
    text = (
        f"blocks   {num_used:,} of {state.num_blocks:,} used, {state.num_blocks - num_used:,} free"
    )
    text += f", {len(state.shared):,} shared" if state.shared else ""
    places = plural(state.num_reserved_tokens, "place")
    text += f"; {plural(state.num_stored_tokens, 'token')} in {places}"
    cells = _cells(state, order, console.width)
    print_lines(console, Group(Text(text, "bold"), *cells))


def _cells(state: BlockState, order: Sequence[str], width: int) -> Iterator[RenderableType]:
    """Yield holder and bar of each block; blocks that do not fit in a few lines are summed up."""
    names = {block: _holder(own) for block, own in state.holders.items()}
    name_width = max((Text(name).cell_len for name in names.values()), default=2)
    num_first = len(str(state.num_blocks)) + 1
    fitting = (width - num_first) // (name_width + _BAR_WIDTH + 3)
    # A power of two, so that each line begins with a number that is easy to add to.
    per_line = 1 << max(0, min(fitting, 16).bit_length() - 1)
    end = min(state.num_blocks, per_line * _MAX_LINES)
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(justify="right", style="dim", width=num_first)
    for first in range(0, end, per_line):
        cells = []
        for block in range(first, min(first + per_line, end)):
            cell = Text("-".ljust(name_width + _BAR_WIDTH + 1), "dim")
            if block in names:
                cell = Text(names[block], request_color(order.index(state.holders[block][0])))
                cell.pad_right(name_width - cell.cell_len + 1)
                cell.append(fill_bar(state.stored[block], state.block_size, _BAR_WIDTH))
            cells.append(cell)
        grid.add_row(str(first), *cells)
    yield grid
    if end < state.num_blocks:
        num_used = sum(block >= end for block in state.holders)
        more = f"{GAP} {plural(state.num_blocks - end, 'more block')}, {num_used:,} used"
        yield Text(more, "dim")


def _holder(holders: Sequence[str]) -> str:
    """Return the first holder's id, and how many others share the block."""
    name = fit(safe(holders[0]), _MAX_NAME_WIDTH)
    return f"{name}+{len(holders) - 1}" if len(holders) > 1 else name


def print_memory(run: DemoRun) -> None:
    """Print the pool's counts, and how many requests regions would have run on the same memory."""
    figures, size = kv_figures(run.records), run.engine.config.block_size
    num_tokens, longest = figures["total"] * size, run.engine.max_model_len
    show.headline("KV memory")
    print_rows(
        console,
        {
            "pool": f"{plural(figures['total'], 'block')} of {size}, {num_tokens:,} tokens",
            "requests at a time": f"{figures['max_concurrent']}; in regions of "
            f"max_model_len={longest} tokens: {num_tokens // longest}",
            "peak used": plural(run.engine.stats()["kv"]["watermark"], "block"),
            "reserved, but empty": f"{figures['waste_share']:.1%} of the places, "
            f"{figures['waste_per_request']:.1f} a request on average",
            "preemptions": f"{figures['num_preemptions']}, {figures['num_resumptions']} resumed: "
            f"{plural(figures['num_recomputed_tokens'], 'token')} recomputed, "
            f"{plural(figures['num_swapped_blocks'], 'block')} swapped out",
            "copies on write": plural(figures["num_copies"], "block"),
        }.items(),
        gap=2,
    )
