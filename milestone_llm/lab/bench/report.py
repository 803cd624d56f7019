"""The report of a bench: a heading, tables of 80 columns, and remarks; also as Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from milestone_llm.trace.text import plural

Tables = Mapping[str, Mapping[str, str]]
"""For each title, the columns of a table: a heading, and a `str.format` text for its figures."""
Filled = tuple[str, list[str], dict[str, list[str]]]
"""A table's title, its headings, and its rows by name."""
PERCENTILES = [
    (f"{metric.upper()}\np{percent}", f"{{{metric}_p{percent}}}")
    for metric in ("ttft", "tpot", "itl")
    for percent in (50, 95, 99)
]
THROUGHPUT = {
    "tok/s": "{tok_s:,.1f}",
    "min..max": "{tok_s_min:,.1f}..{tok_s_max:,.1f}",
    "seconds": "{seconds:.2f}",
    "its seconds /\n{ours}'s": "{speedup:.2f}x",
}
STANDARD_TABLES: Tables = {
    "Throughput{of_rounds}": THROUGHPUT,
    "Steps": {
        "steps": "{steps:,.0f}",
        "rows\na step": "{rows_per_step:.1f}",
        "tokens\na step": "{tokens_per_step:.1f}",
        "useful\npositions": "{useful_share:.1%}",
        "peak KV\n{kv_unit}s": "{kv_watermark:,.0f}",
    },
    "Latency in ms (TTFT: since the start of the run)": dict(PERCENTILES),
}
"""Tables of a workload's bench. Columns and rows without any figure are left out."""


class Number(float):
    """A float that `{}` writes with about three digits; 0 is written as `0`."""

    def __format__(self, spec: str) -> str:
        return super().__format__(spec or (".2f" if 0 < self < 10 else ",.0f"))


def cell(text: str, figures: Mapping[str, float]) -> str:
    """Return `text` with its figures filled in, or an empty text if one is missing."""
    try:
        return text.format_map({name: Number(value) for name, value in figures.items()})
    except KeyError:
        return ""


def filled(
    data: Mapping[str, Any], columns: Mapping[str, str]
) -> tuple[list[str], dict[str, list[str]]]:
    """Return the headings, and the cells of each contestant's row: medians over the rounds."""
    words = {"ours": next(iter(data["contestants"])), "kv_unit": data.get("kv_unit", "")}
    rows = {}
    for name, contestant in data["contestants"].items():
        figures = dict(contestant["median"])
        if name in data["speedups"]:
            figures["speedup"] = data["speedups"][name]["median"]
        rows[name] = [cell(text, figures) for text in columns.values()]
    rows = {name: cells for name, cells in rows.items() if any(cells)}
    used = [index for index in range(len(columns)) if any(cells[index] for cells in rows.values())]
    headings = [heading.format_map(words) for heading in columns]
    return [headings[i] for i in used], {n: [cells[i] for i in used] for n, cells in rows.items()}


def titled(data: Mapping[str, Any], tables: Tables) -> Iterator[Filled]:
    """Yield each table that has rows."""
    of_rounds = f", median of {data['rounds']} rounds" if data["rounds"] > 1 else ""
    for title, columns in tables.items():
        headings, rows = filled(data, columns)
        if rows:
            yield title.format(of_rounds=of_rounds), headings, rows


def heading(data: Mapping[str, Any]) -> dict[str, str]:
    """Return the setup by name, with all that is needed to run it again."""
    work, machine, config = data["workload"], data["environment"], data["engine"]
    names = ("max_num_seqs", "max_num_batched_tokens", "max_model_len")
    limits = [config["milestone"], *(f"{name} {config[name]}" for name in names)]
    lengths = " and ".join(
        str(low) if low == high else f"{low}..{high}"
        for low, high in (work["input_len"], work["output_len"])
    )
    return {
        "workload": f"{work['name']}, seed {work['seed']}: "
        f"{plural(work['num_requests'], 'request')}, "
        f"{lengths} tokens in and out, {work['input_tokens']:,} and {work['output_tokens']:,} in "
        f"total, temperature {work['temperature']:g}",
        "model": f"{data['model']}, {machine['dtype']}",
        **(data["about"] or {"engine": ", ".join(limits)}),
        "machine": f"{machine['device']}, {plural(machine['threads'], 'CPU thread')}; "
        f"Python {machine['python']}, torch {machine['torch']}, "
        f"transformers {machine['transformers']}",
    }


def print_report(console: Console, tables: Iterable[Filled], remarks: Sequence[str]) -> None:
    """Print tables and remarks."""
    for title, headings, rows in tables:
        console.print()
        console.print(table(title, ["", *headings], [[name, *rows[name]] for name in rows]))
    if remarks:
        console.print()
    print_rows(console, [("-", remark) for remark in remarks])


def table(
    title: str, headings: Sequence[str], rows: Iterable[Sequence[str]], show_header: bool = True
) -> Table:
    """Return a table in the common style: the first column has names, the others numbers."""
    look: dict[str, Any] = {"title_justify": "left", "title_style": "bold", "header_style": "bold"}
    grid = Table(title=title, box=None, show_header=show_header, **look)
    for index, text in enumerate(headings):
        grid.add_column(text, justify="right" if index else "left", no_wrap=True)
    for row in rows:
        grid.add_row(*row)
    return grid


def print_rows(console: Console, rows: Iterable[tuple[str, str]], gap: int = 1) -> None:
    """Print lines that begin with a name or a dash. Long texts are wrapped in a column of their
    own."""
    grid = Table.grid(padding=(0, gap))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*map(Text, row))  # no markup: texts may contain [brackets]
    console.print(grid)


def markdown(about: Mapping[str, str], tables: Iterable[Filled], remarks: Sequence[str]) -> str:
    """Return heading, tables and remarks as Markdown, for the documentation."""
    parts = ["\n".join(f"- {name}: {text}" for name, text in about.items())]
    for title, headings, rows in tables:
        parts += [f"**{title}**", markdown_table(headings, rows)]
    if remarks:
        parts.append("\n".join(f"- {remark}" for remark in remarks))
    return "\n\n".join(parts) + "\n"


def markdown_table(headings: Sequence[str], rows: Mapping[str, Sequence[str]]) -> str:
    """Return a Markdown table with a row for each name."""
    lines = ["| | " + " | ".join(text.replace("\n", " ") for text in headings) + " |"]
    lines.append("|---|" + "---:|" * len(headings))
    lines += [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    return "\n".join(lines)


def same_tokens(data: Mapping[str, Any]) -> list[str]:
    """Return for each other contestant how many greedy outputs are the same."""
    if data["workload"]["temperature"] > 0:
        return []
    total = plural(data["workload"]["num_requests"], "output")
    return [
        f"token for token the same as {other}: {same} of {total}"
        for other, same in data["same_tokens"].items()
    ]
