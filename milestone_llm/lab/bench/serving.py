"""Measure the latencies of clients at each request rate.

Requests come over HTTP at random times (Poisson), at a given average rate. Each milestone's
server is started, measured, and ended. What follows -- goes to its command line, such as

    python -m milestone_llm.lab.bench.serving --rate 1 2 4 -- --max-num-seqs 4 --max-queued 64

Times count from the planned sending time of a request, so that a busy client hides nothing. The
report says how late requests were sent at worst. A request is good if it keeps both limits.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from milestone_llm import MILESTONES
from milestone_llm.cli import (
    Formatter,
    above_0,
    add_options,
    at_least_0,
    run_command,
    whole_number,
)
from milestone_llm.core.errors import InputError

from .running_server import running_server, server_command

if TYPE_CHECKING:
    from .open_loop import Outcome

SHOWN = ["m1_single", "m2_batching", "m4_prefix_chunked"]
GROWTH = 1.5
"""Factor between two rates of a sweep."""
TABLES = {
    "what became of the requests": {
        "offered": "{offered:,.0f}",
        "completed": "{completed:,.0f}",
        "refused": "{refused:,.0f}",
        "failed": "{failed:,.0f}",
        "most\ninside": "{most_inside:,.0f}",
        "sent late\nby, ms": "{late_ms:,.0f}",
        "tok/s": "{tok_s:,.1f}",
        "good": "{good_share:.0%}",
        "good\na second": "{goodput:.2f}",
    },
    "latency of the completed ones, in ms; ITL is between events, TPOT between tokens": {
        **{
            f"{metric.upper()}\n{what}": f"{{{metric}_{what}:,.0f}}"
            for metric in ("ttft", "itl")
            for what in ("p50", "p95", "p99", "max")
        },
        "TPOT\nmean": "{tpot_mean:,.1f}",
        "tokens\nan event": "{tokens_per_event:.2f}",
    },
}
"""Tables of each server: columns, and the format of their figures. A row is a rate."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.lab.bench.serving",
        description=__doc__,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    about = "whose servers, one after the other"
    add("--milestones", nargs="+", choices=MILESTONES, default=SHOWN, metavar="NAME", help=about)
    add("--url", help="measure this server instead, which runs already")
    about = "requests a second, one run for each"
    add("--rate", nargs="+", type=above_0, default=[1.0], metavar="R", help=about)
    about = f"go on, {GROWTH:g} times the rate each time, until fewer than half are good"
    add("--sweep", action="store_true", help=about)
    add("--seconds", type=above_0, default=30.0, metavar="S", help="for how long requests come")
    add_options(parser, "input-len", "output-len", input_len=(16, 64), output_len=(8, 64))
    about = "tokens of a system prompt, with which all prompts begin"
    add("--shared-len", type=whole_number, default=0, metavar="N", help=about)
    about = "instead of computing, a step waits so long, and --token-ms for each position in it"
    add("--step-ms", type=above_0, metavar="MS", help=about)
    add("--token-ms", type=at_least_0, default=0.0, metavar="MS", help="see --step-ms")
    about = "most ms to the first token of a good request"
    add("--ttft-limit", type=above_0, default=2000.0, metavar="MS", help=about)
    about = "most ms between its tokens, on average"
    add("--itl-limit", type=above_0, default=500.0, metavar="MS", help=about)
    add_options(parser, "seed", "json", "markdown")
    add("server", nargs="*", metavar="-- OPTION", help="options of the servers' command line")
    args = parser.parse_args(arguments)
    words = sys.argv[1:] if arguments is None else arguments

    def recorded(args: argparse.Namespace) -> None:
        from .record import made_by

        measure(args, made_by(["python", "-m", "milestone_llm.lab.bench.serving", *words]))

    return run_command(recorded, args, check)


def check(args: argparse.Namespace) -> None:
    """Check that the options fit together.

    Raises:
        InputError: they do not.
    """
    if args.url and args.server:
        raise InputError(f"{args.url} runs already: it can't be given {shlex.join(args.server)}")
    if args.token_ms and args.step_ms is None:
        raise InputError("--token-ms goes with --step-ms")


def measure(args: argparse.Namespace, record: dict[str, str]) -> None:
    """Measure the servers, print the results, and write them to the files of the options.

    Raises:
        InputError: a server does not start, or does not answer.
    """
    from milestone_llm.consoles import console

    from .report import print_rows

    data: dict[str, Any] = {**record, **_setting(args), "points": []}
    about = {**data["about"], "machine": record["machine"], "versions": record["versions"]}
    print_rows(console, about.items(), gap=2)
    try:
        for name in [args.url] if args.url else args.milestones:
            words = [*server_command(name, args.step_ms, args.token_ms), *args.server]
            there = args.url and nullcontext(args.url.rstrip("/").removesuffix("/v1"))
            with there or running_server(words) as url:
                for point in _points(args, url):
                    data["points"].append({"server": name, **point})
    finally:  # also after an error: keep what was measured
        if data["points"]:
            report(data, args.json, args.markdown)


def _setting(args: argparse.Namespace) -> dict[str, Any]:
    """Return the setup: workload, limits, server's command line, seed."""
    lengths = ["{}..{}".format(*ends) for ends in (args.input_len, args.output_len)]
    shared = f"{args.shared_len} that all share and " if args.shared_len else ""
    door = server_command("MILESTONE", args.step_ms, args.token_ms)
    about = {
        "workload": f"Poisson arrivals for {args.seconds:g} s, seed {args.seed}: "
        f"{shared}{' and '.join(lengths)} random tokens in and out",
        "good": f"first token within {args.ttft_limit:g} ms, the others every "
        f"{args.itl_limit:g} ms on average",
        "server": args.url or shlex.join(["python", "-m", *door, *args.server]),
    }
    limits = {"ttft_limit": args.ttft_limit, "itl_limit": args.itl_limit}
    return {"about": about, **limits, "seed": args.seed}


def _points(args: argparse.Namespace, url: str) -> Iterator[dict[str, Any]]:
    """Yield the figures of a run at each rate. A sweep raises the rate until the server
    collapses."""
    from milestone_llm.consoles import log_console

    from .measure import short_work
    from .open_loop import figures, send_all

    rates, number = list(args.rate), 0
    while rates:
        rate = rates.pop(0)
        items = arrivals(args, rate, number)
        if not number:  # a warm-up
            _check_answers(url, asyncio.run(send_all(url, short_work(items[:4]))))
        number += 1
        outcomes = asyncio.run(send_all(url, items))
        point = {"rate": rate, **figures(outcomes, args.ttft_limit, args.itl_limit)}
        point["goodput"] = rate * point["good_share"]  # over the time in which requests come
        reasons = [each.error for each in outcomes if not each.is_complete and each.status != 429]
        log_console.print(
            f"{rate:g} a second: {point['completed']} completed, {point['refused']} refused, "
            f"{point['failed']} failed, {point['good_share']:.0%} good; sent late by "
            f"{point['late_ms']:.0f} ms at most" + "".join(f"; {why}" for why in reasons[:1]),
            markup=False,
        )
        yield point
        if args.sweep and not rates and not has_collapsed(point):
            rates.append(float(f"{rate * GROWTH:.3g}"))


def _check_answers(url: str, outcomes: list[Outcome]) -> None:
    """Check that a server serves requests, and streams more than one event.

    Raises:
        InputError: no request was served, or every answer came in one event.
    """
    if not any(each.is_complete for each in outcomes):
        raise InputError(f"{url} serves none of these requests: {outcomes[0].error}")
    done = [each for each in outcomes if each.is_complete and each.num_tokens > 1]
    if done and all(len(each.times) < 2 for each in done):
        raise InputError("each answer comes in one event: serve a model with a tokenizer")


def arrivals(args: argparse.Namespace, rate: float, number: int) -> list[Any]:
    """Return the requests of run `number` on a server: `rate * --seconds`, at random times."""
    from dataclasses import replace
    from random import Random

    from .open_loop import TOKEN_IDS
    from .workloads import random_tokens, with_poisson_arrivals

    num_requests = max(1, round(rate * args.seconds))
    seed = args.seed + 1000 * number  # no prompt of the last run is found in a prefix cache
    items = random_tokens(
        num_requests, args.input_len, args.output_len, vocab_size=TOKEN_IDS, seed=seed
    )
    shared = Random(args.seed).choices(range(TOKEN_IDS), k=args.shared_len)
    items = [replace(item, prompt=shared + item.prompt) for item in items]
    return with_poisson_arrivals(items, rate, seed)


# --- the report -----------------------------------------------------------------------------------


def report(data: dict[str, Any], json_path: Path | None, markdown_path: Path | None) -> None:
    """Print tables and remarks, and write them to the paths that are given."""
    from milestone_llm.consoles import console
    from milestone_llm.lab.bench.record import front_matter
    from milestone_llm.lab.bench.report import markdown, print_report

    tables, remarks = list(_tables(data)), _remarks(data)
    print_report(console, tables, remarks)
    if json_path:
        json_path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if markdown_path:
        text = front_matter(data) + markdown(data["about"], tables, remarks)
        markdown_path.write_text(text, encoding="utf-8")


def has_collapsed(point: dict[str, Any]) -> bool:
    """Return whether fewer than half of the requests were good."""
    return bool(point["good_share"] < 0.5)


def _tables(data: dict[str, Any]) -> Iterator[tuple[str, list[str], dict[str, list[str]]]]:
    """Yield title, headings, and rows by rate."""
    from milestone_llm.lab.bench.report import cell

    for server, points in groupby(data["points"], key=itemgetter("server")):
        known = [{k: v for k, v in p.items() if isinstance(v, (int, float))} for p in points]
        for title, columns in TABLES.items():
            rows = {f"{p['rate']:g}/s": [cell(c, p) for c in columns.values()] for p in known}
            yield f"{server}: {title}", list(columns), rows


def _remarks(data: dict[str, Any]) -> list[str]:
    remarks = []
    for point in data["points"]:
        server, rate = point["server"], f"at {point['rate']:g} a second"
        if has_collapsed(point):
            remarks.append(f"{server} collapses {rate}: {point['good_share']:.0%} are good")
        if point["refused"] and point["completed"]:
            num_inside, served = point["most_inside"], point["completed_s"]
            remarks.append(
                f"{server} {rate}: {served:.1f} are served a second and {num_inside} are inside at "
                f"most, so a wait is at most about {num_inside / served:.1f} s"
            )
    return remarks


if __name__ == "__main__":
    sys.exit(main())
