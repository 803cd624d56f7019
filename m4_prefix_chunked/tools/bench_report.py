"""What a scenario of the bench says: tables for 80 columns, verdicts, and Markdown to keep."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from milestone_llm.bench.report import print_heading, short
from milestone_llm.cli import console

from .bench_contest import Contest


def print_contest(contest: Contest) -> None:
    """What ran where, medians over the rounds, and the ratios."""
    data = contest.as_data()
    engine = next(iter(contest.engines.values()))
    console.print()
    print_heading(console, data["workload"], engine, data["model"])
    num_rounds = len(next(iter(contest.results.values())))
    of = "" if num_rounds == 1 else f", medians of {num_rounds} rounds"
    table = Table(
        title=f"Times in ms{of}",
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="bold",
    )
    table.add_column("", no_wrap=True)
    for heading in contest.columns.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for name, cells in medians(data).items():
        table.add_row(name, *cells)
    console.print()
    console.print(table)
    console.print()
    for line in verdicts(data):
        grid = Table.grid(padding=(0, 1))
        grid.add_row("-", line)
        console.print(grid)


def medians(data: Mapping[str, Any]) -> dict[str, list[str]]:
    """Per contestant the cells of its row."""
    return {
        name: [
            _cell(statistics.median(each[figure] for each in rounds)) for figure in data["columns"]
        ]
        for name, rounds in data["rounds"].items()
    }


def _cell(value: float) -> str:
    return short(value) if value else "0"


def verdicts(data: Mapping[str, Any]) -> list[str]:
    """The ratios in words, where something loses, and whether everybody gave the same tokens."""
    lines = []
    for target in data["targets"]:
        rounds = target["rounds"]
        spread = f" ({min(rounds):.3f}..{max(rounds):.3f})" if len(rounds) > 1 else ""
        line = (
            f"{target['meaning']}, {target['ours']} against {target['theirs']}: "
            f"{target['ratio']:.3f}x{spread}"
        )
        if target["at_most"] is not None:
            verdict = "met" if target["is_met"] else "MISSED"
            line += f"; target at most {target['at_most']:g}x: {verdict}"
        lines.append(line)
        is_steady = len(rounds) > 1 and min(rounds) > 1  # and not one slow round of the machine
        if target["ratio"] > 1.02 and is_steady and target["loses"]:
            lines.append(f"{target['ours']} loses there: {target['loses']}")
    total = data["workload"]["num_requests"]
    first, *others = data["same_tokens"]
    for name in others:
        lines.append(
            f"{data['same_tokens'][name]} of {total} outputs are token for token the same with "
            f"{first} and {name}"
        )
    return lines


def write_markdown(contests: Sequence[Mapping[str, Any]]) -> str:
    """Tables and verdicts of all contests, to be kept beside the documentation."""
    parts = []
    for data in contests:
        machine, work = data["environment"], data["workload"]
        headings = [text.replace("\n", " ") for text in data["columns"].values()]
        lines = [
            f"**{data['title']}.** {data['model']} in {machine['dtype']} on {machine['device']}, "
            f"{machine['threads']} threads, torch {machine['torch']}, transformers "
            f"{machine['transformers']}; seed {work['seed']}, medians of "
            f"{len(next(iter(data['rounds'].values())))} interleaved rounds, times in ms.",
            "",
            "| | " + " | ".join(headings) + " |",
            "|---|" + "---:|" * len(headings),
            *(f"| {name} | {' | '.join(cells)} |" for name, cells in medians(data).items()),
            "",
            *(f"- {line}" for line in verdicts(data)),
        ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"
