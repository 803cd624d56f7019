"""What the bench of KV layouts says: tables for 80 columns, remarks, and Markdown to keep."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from milestone_llm.bench.measure import RunResult, percentile
from milestone_llm.bench.report import short

Figures = dict[str, float]

LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
"""Times of a request: until its first token, between tokens, until its last; from the run's start,
for all requests are there then."""


def round_figures(result: RunResult) -> Figures:
    """Numbers of one round, times in ms: tokens and speed, latencies, KV memory.

    Each latency has a mean over the requests, and its percentiles 50 and 95.
    """
    times = result.token_times
    values = {
        "ttft": [own[0] for own in times],
        "tpot": [(own[-1] - own[0]) / (len(own) - 1) for own in times if len(own) > 1],
        "latency": [own[-1] for own in times],
    }
    num_tokens = sum(map(len, result.token_ids))
    figures: Figures = {
        "completion_tokens": num_tokens,
        "seconds": result.seconds,
        "tok_s": num_tokens / result.seconds,
        "cpu_seconds": result.cpu_seconds,
        **result.facts,
    }
    for name, own in values.items():
        milliseconds = [1e3 * value for value in own] or [0.0]
        figures[f"{name}_mean"] = statistics.fmean(milliseconds)
        for percent in (50, 95):
            figures[f"{name}_p{percent}"] = percentile(milliseconds, percent)
    return figures


def medians(rounds: Sequence[Figures]) -> Figures:
    """The median of each figure over the rounds."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def heading(data: Mapping[str, Any]) -> dict[str, str]:
    """What runs where: enough to run it again."""
    work, machine = data["workload"], data["environment"]
    (low_in, high_in), (low_out, high_out) = work["input_len"], work["output_len"]
    lines = {
        "workload": f"{work['num_requests']} requests of random tokens, seed {work['seed']}: "
        f"{low_in}..{high_in} in, {low_out}..{high_out} out, {work['input_tokens']:,} and "
        f"{work['output_tokens']:,} in total, greedy",
        "model": f"{data['model']}, {machine['dtype']}",
    }
    for layout, config in data["engines"].items():
        length, rows = config["max_model_len"], config["max_num_seqs"]
        memory = f"{rows} slots of max_model_len={length}: {rows * length:,} tokens of KV"
        if layout == "block":
            size = config["block_size"]
            num_blocks = config["kv_cache_tokens"] // size
            memory = (
                f"{num_blocks:,} blocks of {size}: {num_blocks * size:,} tokens of KV; "
                f"max_num_seqs={rows}, max_model_len={length}, {config['preemption']}"
            )
        lines[layout] = f"{config['milestone']}, {memory}"
    lines["machine"] = (
        f"{machine['device']}, {machine['threads']} threads; Python {machine['python']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}"
    )
    return lines


def print_heading(console: Console, data: Mapping[str, Any]) -> None:
    """The same, for people."""
    grid = Table.grid(padding=(0, 2))
    for name, text in heading(data).items():
        grid.add_row(name, text)
    console.print(grid)


def print_report(console: Console, data: Mapping[str, Any]) -> None:
    """Throughput, latency, memory, remarks; medians over the rounds."""
    figures = {layout: medians(rounds) for layout, rounds in data["rounds"].items()}
    num_rounds = len(next(iter(data["rounds"].values())))
    of = "" if num_rounds == 1 else f", median of {num_rounds} rounds"
    speed = _table(f"Throughput{of}", ["tok/s", "min..max", "seconds", "requests\nat a time"])
    memory = _table(
        f"KV memory, in tokens{of}",
        ["reserved", "stored", "empty\nshare", "empty\na request", "peak\nused", "preemp-\ntions"],
    )
    latency = _table(
        f"Times of a request in ms{of}",
        [f"{label}\n{part}" for label in LATENCIES.values() for part in ("mean", "p50", "p95")],
    )
    for layout, own in figures.items():
        speeds = [each["tok_s"] for each in data["rounds"][layout]]
        speed.add_row(
            layout,
            f"{own['tok_s']:,.1f}",
            f"{min(speeds):,.1f}..{max(speeds):,.1f}",
            f"{own['seconds']:.2f}",
            f"{own['max_concurrent']:.0f}",
        )
        memory.add_row(
            layout,
            f"{own['reserved_tokens']:,.0f}",
            f"{own['stored_tokens']:,.0f}",
            f"{own['waste_share']:.1%}",
            f"{own['waste_per_request']:,.1f}",
            f"{own['peak_used']:,.0f} of {own['total']:,.0f}",
            f"{own['num_preemptions']:.0f}",
        )
        numbers = [own[f"{name}_{part}"] for name in LATENCIES for part in ("mean", "p50", "p95")]
        latency.add_row(layout, *map(short, numbers))
    for table in (speed, memory, latency):
        console.print()
        console.print(table)
    console.print()
    for remark in remarks(data, figures):
        grid = Table.grid(padding=(0, 1))
        grid.add_row("-", remark)
        console.print(grid)


def remarks(data: Mapping[str, Any], figures: Mapping[str, Figures]) -> list[str]:
    """What the comparison shows."""
    lines = []
    if len(figures) == 2:
        slot, block = figures["slot"], figures["block"]
        pairs = zip(data["rounds"]["slot"], data["rounds"]["block"], strict=True)
        ratios = [own["seconds"] / other["seconds"] for own, other in pairs]
        lines.append(
            f"blocks serve {block['max_concurrent'] / slot['max_concurrent']:.2f}x the requests "
            f"at a time and {statistics.median(ratios):.2f}x the tokens a second of slots "
            f"({min(ratios):.2f}x to {max(ratios):.2f}x by round)"
        )
        same, total = data["same_tokens"], data["workload"]["num_requests"]
        lines.append(f"{same} of {total} outputs are token for token the same in both layouts")
    if "block" in figures:
        size = data["engines"]["block"]["block_size"]
        lines.append(
            f"a block of {size} may waste half a block and one slot a request, {size / 2 + 1:g} "
            f"tokens: it wasted {figures['block']['waste_per_request']:.1f}"
        )
    return lines


def write_markdown(path: Path, data: Mapping[str, Any]) -> None:
    """A baseline to keep: what ran where, and a row for each round and layout."""
    columns = {
        "tokens": "{completion_tokens:.0f}",
        "seconds": "{seconds:.2f}",
        "tok/s": "{tok_s:.1f}",
        **{
            f"{label} {part}, ms": f"{{{name}_{part}:.1f}}"
            for name, label in LATENCIES.items()
            for part in ("mean", "p50", "p95")
        },
        "requests at a time": "{max_concurrent:.0f}",
        "watermark": "{peak_used:.0f} of {total:.0f}",
        "empty a request": "{waste_per_request:.1f}",
        "empty share": "{waste_share:.1%}",
        "preemptions": "{num_preemptions:.0f}",
    }
    lines = [f"- {name}: {text}" for name, text in heading(data).items()]
    lines += ["", "| round | layout | " + " | ".join(columns) + " |"]
    lines.append("|---:|---|" + "---:|" * len(columns))
    layouts = list(data["rounds"])
    for number in range(len(data["rounds"][layouts[0]])):
        for layout in layouts:
            figures = data["rounds"][layout][number]
            cells = [cell.format(**figures) for cell in columns.values()]
            lines.append(f"| {number + 1} | {layout} | " + " | ".join(cells) + " |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, header_style="bold"
    )
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table
