"""What a benchmark says in the end: tables for 80 columns, remarks, and plain data for JSON."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from .measure import RunResult, medians, speedups
from .workloads import WorkItem

Results = Mapping[str, Sequence[RunResult]]
"""Results of each contestant, one a round; the first contestant is the engine."""


def environment(engine: Any) -> dict[str, Any]:
    """Versions, and the machine as far as it matters."""
    device = engine.model.device
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "threads": torch.get_num_threads(),
        "dtype": str(engine.model.dtype).removeprefix("torch."),
    }


def describe_work(name: str, items: Sequence[WorkItem], seed: int) -> dict[str, Any]:
    """A workload in numbers."""
    inputs = [len(item.prompt) for item in items]
    outputs = [item.params.max_tokens for item in items]
    return {
        "name": name,
        "seed": seed,
        "num_requests": len(items),
        "input_tokens": sum(inputs),
        "output_tokens": sum(outputs),
        "input_len": [min(inputs), max(inputs)],
        "output_len": [min(outputs), max(outputs)],
        "temperature": items[0].params.temperature,
    }


def as_data(engine: Any, model_name: str, work: dict[str, Any], results: Results) -> dict[str, Any]:
    """All that was set and measured, ready for JSON."""
    ours, *baselines = results
    ratios = {name: speedups(results[ours], results[name]) for name in baselines}
    data = {
        "model": model_name,
        "engine": {
            "milestone": engine.milestone,
            **asdict(engine.config),
            "max_model_len": engine.max_model_len,
        },
        "workload": work,
        "environment": environment(engine),
        "rounds": len(results[ours]),
        "kv_unit": engine.stats()["kv"]["unit"],
        "contestants": {
            name: {"median": medians(runs), "rounds": [run.figures() for run in runs]}
            for name, runs in results.items()
        },
        "speedups": {
            name: {"median": statistics.median(values), "rounds": values}
            for name, values in ratios.items()
        },
        "same_tokens": {
            name: sum(map(list.__eq__, results[ours][0].token_ids, results[name][0].token_ids))
            for name in baselines
        },
    }
    return {**data, "remarks": remarks(data)}


def remarks(data: Mapping[str, Any]) -> list[str]:
    """What the figures say against the engine, and whether its tokens can be trusted."""
    name = data["engine"]["milestone"]
    figures = data["contestants"][name]["median"]
    lines = []
    if figures["useful_share"] < 0.95:
        lines.append(
            f"{1 - figures['useful_share']:.0%} of the positions that {name} computed were "
            "padding: prompts padded to the longest, and finished rows that wait for the last one"
        )
    for other, speedup in data["speedups"].items():
        theirs = data["contestants"][other]["median"]
        if speedup["median"] < 1:
            lines.append(f"{name} loses against {other}: {speedup['median']:.2f}x its tok/s")
        for metric, meaning in (
            ("ttft_p50", "the first token comes later"),
            ("tpot_p50", "each further token takes longer"),
            ("itl_p99", "the longest pauses between tokens are longer"),
        ):
            if metric in figures and theirs.get(metric, 1e30) * 1.05 < figures[metric]:
                lines.append(
                    f"{name} loses against {other} where {meaning}: {label(metric)} "
                    f"{figures[metric]:.1f} ms against {theirs[metric]:.1f} ms"
                )
    total = data["workload"]["num_requests"]
    if data["workload"]["temperature"] == 0:
        lines += [
            f"{same} of {total} outputs are token for token those of {other}"
            for other, same in data["same_tokens"].items()
        ]
    return lines


def label(metric: str) -> str:
    """`itl_p99` as people write it."""
    name, _, percent = metric.partition("_")
    return f"{name.upper()} {percent}"


def print_heading(console: Console, work: Mapping[str, Any], engine: Any, model_name: str) -> None:
    """What runs where: enough to run it again."""
    machine, config = environment(engine), engine.config
    lengths = " and ".join(
        f"{low}..{high}" for low, high in (work["input_len"], work["output_len"])
    )
    lines = {
        "workload": f"{work['name']}, seed {work['seed']}: {work['num_requests']} requests, "
        f"{lengths} tokens in and out, {work['input_tokens']:,} and {work['output_tokens']:,} in "
        f"total, temperature {work['temperature']:g}",
        "model": f"{model_name}, {machine['dtype']}",
        "engine": f"{engine.milestone}, max_num_seqs {config.max_num_seqs}, "
        f"max_num_batched_tokens {config.max_num_batched_tokens}, "
        f"max_model_len {engine.max_model_len}",
        "machine": f"{machine['device']}, CPU threads: {machine['threads']}; "
        f"Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}",
    }
    grid = Table.grid(padding=(0, 2))
    for name, text in lines.items():
        grid.add_row(name, text)
    console.print(grid)


def print_report(console: Console, data: Mapping[str, Any]) -> None:
    """Throughput, steps, latency, remarks."""
    for table in (_throughput_table(data), _steps_table(data), _latency_table(data)):
        console.print()
        console.print(table)
    if data["remarks"]:
        console.print()
    for remark in data["remarks"]:
        grid = Table.grid(padding=(0, 1))
        grid.add_row("-", remark)
        console.print(grid)


def _throughput_table(data: Mapping[str, Any]) -> Table:
    """One line a contestant; the last column says how many times faster the engine is."""
    ours, num_rounds = data["engine"]["milestone"], data["rounds"]
    title = "Throughput" if num_rounds == 1 else f"Throughput, median of {num_rounds} rounds"
    columns = ["tok/s", "seconds"] if num_rounds == 1 else ["tok/s", "min..max", "seconds"]
    if data["speedups"]:
        columns.append(f"{ours}\nagainst it")
    table = _table(title, columns)
    for name, contestant in data["contestants"].items():
        median, speedup = contestant["median"], data["speedups"].get(name)
        cells = [f"{median['tok_s']:,.1f}", f"{median['seconds']:.2f}"]
        if num_rounds > 1:
            cells.insert(1, f"{median['tok_s_min']:,.1f}..{median['tok_s_max']:,.1f}")
        if data["speedups"]:
            cells.append(f"{speedup['median']:.2f}x" if speedup else "")
        table.add_row(name, *cells)
    return table


def _steps_table(data: Mapping[str, Any]) -> Table:
    """What only engines tell of their steps."""
    unit = data["kv_unit"]
    table = _table(
        "Steps",
        ["steps", "rows\na step", "tokens\na step", "useful\npositions", f"peak KV\n{unit}s"],
    )
    for name, contestant in data["contestants"].items():
        median = contestant["median"]
        if "steps" in median:
            table.add_row(
                name,
                f"{median['steps']:,.0f}",
                f"{median['rows_per_step']:.1f}",
                f"{data['workload']['output_tokens'] / median['steps']:.1f}",
                f"{median['useful_share']:.1%}",
                f"{median['kv_watermark']:,.0f}",
            )
    return table


def _latency_table(data: Mapping[str, Any]) -> Table:
    metrics = [f"{name}_p{percent}" for name in ("ttft", "tpot", "itl") for percent in (50, 95, 99)]
    table = _table(
        "Latency in ms (TTFT: since the start of the run)",
        [label(metric).replace(" ", "\n") for metric in metrics],
    )
    for name, contestant in data["contestants"].items():
        values = [contestant["median"].get(metric) for metric in metrics]
        table.add_row(name, *("-" if value is None else short(value) for value in values))
    return table


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, header_style="bold"
    )
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def short(milliseconds: float) -> str:
    """A number of about three digits."""
    return f"{milliseconds:.2f}" if milliseconds < 10 else f"{milliseconds:,.0f}"
