"""What does HTTP cost? `python -m milestone_llm.serving.overhead`

The same requests, all there at the start, in three ways: `generate` in a process of its own, and a
server that answers them whole and as streams. Then: requests refused a second, and the server's
memory over many short requests. Ways take turns, and medians of rounds count. CPU time is that of
the process with the engine, and beside it that of HTTP's; on a busy machine it says more than the
clock.

With --step-ms the model is replaced by a wait, to see a server under an engine as fast as a GPU's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from milestone_llm import MILESTONES
from milestone_llm.cli import (
    Formatter,
    add_options,
    at_least_0,
    console,
    positive,
    run_command,
    try_to_write,
    whole_number,
)

from .bench_report import machine
from .overhead_processes import Offline, Served, Times, make_work


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.serving.overhead",
        description=__doc__,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--milestone", choices=MILESTONES, default="m4_prefix_chunked", help="whose engine")
    add_options(parser, "model", "threads", "json")
    about = "its requests, all at one time, instead of those that the next options describe"
    add("--workload", choices=["mixed", "nano"], help=about)
    add("--requests", type=positive, default=16, metavar="N", help="at one time")
    add("--input-len", type=positive, default=32, metavar="N", help="tokens of each prompt")
    add("--output-len", type=positive, default=64, metavar="N", help="tokens of each output")
    add("--rounds", type=positive, default=3)
    add("--step-ms", type=at_least_0, help="instead of computing, wait so long in each step")
    add(
        "--short-requests",
        type=whole_number,
        default=0,
        metavar="N",
        help="to watch the memory under",
    )
    add_options(parser, "set")
    return run_command(measure, parser.parse_args(arguments))


def measure(args: argparse.Namespace) -> None:
    """Print what is measured, and write it where --json says."""
    if args.json:
        try_to_write(args.json)
    work = make_work(args)
    args.requests = len(work)
    num_tokens, before = sum(item["max_tokens"] for item in work), machine()
    with TemporaryDirectory() as folder, Offline(args) as offline, Served(args, folder) as served:
        ways: dict[str, Callable[[], Times]] = {
            "generate": lambda: offline.timed(offline.work),
            "whole": lambda: served.timed(lambda: served.work(is_stream=False)),
            "stream": lambda: served.timed(lambda: served.work(is_stream=True)),
        }
        rounds: list[dict[str, Times]] = []
        for number in range(args.rounds + 1):
            times = {name: way() for name, way in ways.items()}
            rounds += [times] if number else []  # the first is for caches to fill
        result: dict[str, Any] = {
            "command": " ".join(["python -m milestone_llm.serving.overhead", *sys.argv[1:]]),
            "machine": before,
            "tokens_per_second": {
                name: round(num_tokens / statistics.median(r[name].wall for r in rounds), 1)
                for name in ways
            },
            "seconds": {name: [round(r[name].wall, 3) for r in rounds] for name in ways},
            "share_of_generate": {
                name: round(statistics.median(r["generate"].wall / r[name].wall for r in rounds), 3)
                for name in ("whole", "stream")
            },
            "cpu_ms_per_token": {
                name: round(1e3 * statistics.median(r[name].cpu for r in rounds) / num_tokens, 3)
                for name in ways
            },
            "http_cpu_ms_per_token": {
                name: round(1e3 * statistics.median(r[name].http for r in rounds) / num_tokens, 3)
                for name in ("whole", "stream")
            },
            "tokens_per_event": round(num_tokens / max(1, served.num_events), 2),
            **served.refusals(),
        }
        if args.short_requests:
            result["rss_mib_by_short_requests"] = served.memory(args.short_requests)
    console.print_json(json.dumps(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
