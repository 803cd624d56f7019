"""Turn recorded measurements into text for a page: `--json` of a milestone's bench into a table.

A Markdown file, such as that of `m3_paged.bench --markdown`, is used without the lines at its head,
which say how it was made. If a record's head has `runs at: COMMIT`, the program that made it has
been deleted since: it runs at that commit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COLUMNS = {  # those without figures are left out
    "tok/s": "{tok_s:,.1f}",
    "slowest and fastest round": "{tok_s_min:,.1f}, {tok_s_max:,.1f}",
    "seconds": "{seconds:,.1f}",
    "mean latency, ms": "{latency_mean:,.0f}",
    "TTFT p50, ms": "{ttft_p50:,.0f}",
    "TPOT p50, ms": "{tpot_p50:,.1f}",
    "steps": "{num_steps:,.0f}",
    "most rows": "{most_rows:.0f}",
    "positions": "{positions:,.0f}",
    "its time / {ours}'s": "{speedup:.2f}x",
}


def measured(path: Path, command: str) -> str:
    """Return the text for a recorded file, with the command that records it."""
    made_by = f"```sh\n{command}\n```\n"
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return f"\n{as_table(json.loads(text))}\n\n{made_by}\n"
    if commit := runs_at(text):
        made_by = f"```sh\ngit checkout {commit}    # has this program\n{command}\n```\n"
    return f"\n{parts(text)[1].strip()}\n\n{made_by}\n"


def runs_at(text: str) -> str:
    """The commit at which a record's command runs; empty if it runs now."""
    return dict(parts(text)[0]).get("runs at", "")


def parts(text: str) -> tuple[list[tuple[str, str]], str]:
    """The fields at the head of a Markdown record, and the rest; a field may be there twice."""
    if not text.startswith("---\n"):
        return [], text
    head, _, rest = text.removeprefix("---\n").partition("\n---\n")
    fields = [line.partition(": ") for line in head.splitlines()]
    return [(name, value) for name, _, value in fields], rest


def as_table(data: dict[str, Any]) -> str:
    """What a bench of any milestone recorded: what ran where, then a row for each contestant."""
    from milestone_llm.lab.bench.report import heading, markdown, titled

    data = {"about": {}, **data}
    tables = titled(data, {"Throughput and latency{of_rounds}": COLUMNS})
    return markdown(heading(data), tables, remarks=[]).strip()
