"""Draw which KV block belonged to whom, step by step.

    python -m m3_paged.kvmap trace.jsonl -o kvmap.png

A line is a block, time goes to the right. A bar has the colour of its owner and fills from pale to
solid as tokens come in; blank is free. A block of several requests is striped in their colours and
has a black frame.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from milestone_llm.trace.text import plural
from milestone_llm.trace.tracer import read_jsonl

from .block_history import BlockState, block_history, block_runs
from .kvmap_parts import Scale, draw_bars, draw_marks, draw_names, legend_handles
from .style import request_color
from .timeline_spans import arrival_order

SUFFIXES = (".png", ".svg")
_WIDTH, _MAX_HEIGHT = 9.5, 7.0
"""Inches."""
_LEGEND_WIDTH = 1.8
_RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "svg.hashsalt": "kvmap",  # the same trace gives the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw_kvmap(records: Sequence[dict[str, Any]], path: str | Path, title: str = "") -> Path:
    """Draw the map of a trace and write the picture.

    Args:
        records: as `read_jsonl` or `StepRecord.to_dict` give them.
        path: where to write; ends in .png or .svg.
        title: instead of the milestone's name.

    Returns:
        The path written.

    Raises:
        ValueError: the trace has no steps, several runs or no blocks, or the path another ending.
    """
    path = Path(path)
    if path.suffix.lower() not in SUFFIXES:
        raise ValueError(f"{path}: a map is written as .png or .svg")
    states = block_history(records)
    with matplotlib.rc_context(_RC):
        figure = _draw_figure(records, states, title or records[0]["milestone"])
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        figure.savefig(path, dpi=150, metadata=metadata)
    return path


def _draw_figure(
    records: Sequence[dict[str, Any]], states: Sequence[BlockState], title: str
) -> Figure:
    num_blocks, steps = states[0].num_blocks, [state.step for state in states]
    height = min(max(0.17 * num_blocks, 1.4), _MAX_HEIGHT)
    scale = Scale((_WIDTH - _LEGEND_WIDTH) / (steps[-1] - steps[0] + 1), height / num_blocks)
    figure = Figure(figsize=(_WIDTH, height + 1.3), layout="constrained")
    axes = figure.subplots()
    axes.set_xlim(steps[0] - 0.5, steps[-1] + 0.5)
    axes.set_ylim(num_blocks - 0.4, -0.6)
    axes.set_xlabel("step")
    axes.set_ylabel("slot" if records[0]["kv"]["unit"] == "slot" else "KV block")
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, steps=[1, 2, 4, 5, 8, 10]))
    order = arrival_order(list(records))
    colors = {name: request_color(index) for index, name in enumerate(order)}
    runs = block_runs(states)
    draw_bars(axes, runs, steps, states[0].block_size, colors, scale)
    draw_names(axes, runs, steps, scale)
    kinds = draw_marks(axes, records, scale)
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=34)
    axes.annotate(
        _subtitle(records, states),
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 20),
        textcoords="offset points",
        fontsize=9,
    )
    is_shared = any(state.shared for state in states)
    figure.legend(
        handles=legend_handles(order, colors, is_shared, kinds),
        loc="outside right upper",
        frameon=False,
        fontsize=8,
    )
    return figure


def _subtitle(records: Sequence[dict[str, Any]], states: Sequence[BlockState]) -> str:
    unit, size = records[0]["kv"]["unit"], states[0].block_size
    reserved = sum(state.num_reserved_tokens for state in states)
    stored = sum(state.num_stored_tokens for state in states)
    parts = [
        plural(len(states), "step"),
        f"{plural(states[0].num_blocks, unit)} of {plural(size, 'token')}",
        f"at most {max(len(state.owners) for state in states):,} in use",
    ]
    if reserved:
        parts.append(f"{1 - stored / reserved:.1%} of the reserved places empty")
    num_preemptions = sum(len(record["preempted"]) for record in records)
    if num_preemptions:
        parts.append(plural(num_preemptions, "preemption"))
    return ", ".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Command line; bad input ends with exit code 2 and one line that says why."""
    parser = argparse.ArgumentParser(prog="python -m m3_paged.kvmap", description=__doc__)
    parser.add_argument("trace", metavar="trace.jsonl", help="written by trace=PATH")
    parser.add_argument("-o", "--output", default="kvmap.png", help=".png or .svg")
    parser.add_argument("--title", default="", help="default: the milestone")
    options = parser.parse_args(arguments)
    try:
        written = draw_kvmap(read_jsonl(options.trace), options.output, options.title)
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror}")
    except KeyError as error:
        parser.error(f"a record has no field {error}")
    except ValueError as error:
        parser.error(str(error))
    print(f"wrote {written}")


if __name__ == "__main__":
    main()
