"""Turns recorded measurements into text of a page: `--json` of a milestone's bench into a table.

A Markdown file, such as `m3_paged.bench --markdown` writes, is taken as it is. Figures come from
these files alone; a file that is not there yet gives a line that says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def measured(path: Path, command: str) -> str:
    """The text for a recorded file, with the command that records it."""
    made_by = f"```sh\n{command}\n```\n"
    if not path.exists():
        return f"\nNot recorded yet. This command does it:\n\n{made_by}\n"
    if path.suffix == ".json":
        text = as_table(json.loads(path.read_text(encoding="utf-8")))
    else:
        text = path.read_text(encoding="utf-8").strip()
    return f"\n{text}\n\n{made_by}\n"


def as_table(data: dict[str, Any]) -> str:
    """What a bench of any milestone recorded: what ran where, then a row for each contestant."""
    work, machine, engine = data["workload"], data["environment"], data["engine"]
    lines = [
        f"{work['num_requests']} requests of {_range(work['input_len'])} tokens in and "
        f"{_range(work['output_len'])} out ({work['output_tokens']:,} output tokens), "
        f"{data['model']} in {machine['dtype']}, at most {engine['max_num_seqs']} at a time, on "
        f"{machine['device']}"
        + (f", threads: {machine['threads']}" if machine["device"] == "cpu" else "")
        + f"; torch {machine['torch']}, transformers {machine['transformers']}; "
        f"medians of {data['rounds']} rounds.",
        "",
        "| | tok/s | slowest and fastest round | TTFT p50, ms | TPOT p50, ms | speedup |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for name, results in data["contestants"].items():
        median = results["median"]
        ratio = data["speedups"].get(name)
        cells = (
            name,
            f"{median['tok_s']:,.1f}",
            f"{median['tok_s_min']:,.1f}, {median['tok_s_max']:,.1f}",
            f"{median['ttft_p50']:,.0f}" if "ttft_p50" in median else "",
            f"{median['tpot_p50']:,.1f}" if "tpot_p50" in median else "",
            f"{ratio['median']:.2f}x over it" if ratio else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(ends: list[int]) -> str:
    return f"{ends[0]}..{ends[1]}"
