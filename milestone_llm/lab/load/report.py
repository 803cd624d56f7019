"""The report of the serving bench: tables, remarks, records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from milestone_llm.command.cli import console

TABLES = {
    "{server}: what became of the requests": {
        "offered": "{offered:,.0f}",
        "completed": "{completed:,.0f}",
        "refused": "{refused:,.0f}",
        "failed": "{failed:,.0f}",
        "most\ninside": "{most_inside:,.0f}",
        "tok/s": "{tok_s:,.1f}",
        "good": "{good_share:.0%}",
        "good\na second": "{goodput:.2f}",
    },
    "{server}: latency of the completed ones, in ms": {
        f"{metric.upper()}\n{what}": f"{{{metric}_{what}:,.0f}}"
        for metric in ("ttft", "itl")
        for what in ("p50", "p95", "p99", "max")
    },
    "{server}: means and tails in ms; ITL is between events, TPOT between tokens": {
        **{
            f"{metric.upper()}\n{what}": f"{{{metric}_{what}:,.2f}}"
            for metric in ("ttft", "itl", "tpot")
            for what in ("mean", "p99")
        },
        "tokens\nan event": "{tokens_per_event:.2f}",
    },
}


def report(data: dict[str, Any], json_path: Path | None, markdown: Path | None) -> None:
    """Print the tables and remarks of a bench, and write them where there is a path."""
    from milestone_llm.lab.bench.report import print_report, print_rows

    for name, points in _by_server(data).items():
        print_report(console, _as_report(points), _titled(name))
    console.print()
    print_rows(console, [("-", remark) for remark in _remarks(data)])
    if json_path:
        json_path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if markdown:
        markdown.write_text(_markdown(data), encoding="utf-8")


def has_collapsed(point: dict[str, Any]) -> bool:
    """Whether fewer than half of the requests were good."""
    return bool(point["good_share"] < 0.5)


def _by_server(data: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    points: dict[str, list[dict[str, Any]]] = {}
    for point in data["points"]:
        points.setdefault(point["server"], []).append(point)
    return points


def _titled(server: str) -> dict[str, dict[str, str]]:
    return {title.format(server=server): columns for title, columns in TABLES.items()}


def _as_report(points: list[dict[str, Any]]) -> dict[str, Any]:
    """As the reports of the other benches take it: a row for each rate."""
    rows = {
        f"{point['rate']:g}/s": {
            "median": {k: v for k, v in point.items() if isinstance(v, (int, float))}
        }
        for point in points
    }
    return {"contestants": rows, "speedups": {}, "rounds": 1, "remarks": []}


def _remarks(data: dict[str, Any]) -> list[str]:
    late = max(point["late_ms"] for point in data["points"])
    return [
        *(
            f"{point['server']} collapses at {point['rate']:g} a second: "
            f"{point['good_share']:.0%} are good"
            for point in data["points"]
            if has_collapsed(point)
        ),
        *(
            f"{point['server']} at {point['rate']:g} a second: {point['completed_s']:.1f} are "
            f"served a second and {point['most_inside']} are inside at most, so a wait is "
            f"at most about {point['most_inside'] / point['completed_s']:.1f} s"
            for point in data["points"]
            if point["refused"] and point["completed"]
        ),
        f"at worst, the client sent a request {late:.0f} ms late, which counts as latency",
    ]


def _markdown(data: dict[str, Any]) -> str:
    from milestone_llm.lab.bench.record import front_matter
    from milestone_llm.lab.bench.report import markdown_table, titled

    parts = ["\n".join(f"- {name}: {text}" for name, text in data["about"].items())]
    for name, points in _by_server(data).items():
        for title, headings, rows in titled(_as_report(points), _titled(name)):
            parts += [f"**{title}**", markdown_table(headings, rows)]
    parts.append("\n".join(f"- {remark}" for remark in _remarks(data)))
    return front_matter(data) + "\n\n".join(parts) + "\n"
