"""A thousand requests against a pool that is too small: `python -m m4_prefix_chunked.stress`

Lognormal lengths, shared prefixes, conversations, priorities, tenants, aborts; after every step all
books are checked (reference counts, free list, hashes). At the end the report says how fast it
was, how evenly, whether process memory grew, and whether every block came back. The exit status is
1 if a block was lost, a request ended in an error, or an invariant did not hold.

  --arrivals burst             all connections at once, then nobody, again and again
  --preemption swap            preempted requests move to host memory instead of being recomputed
  --set prefill_policy=prefill_first enable_prefix_caching=false
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from milestone_llm.cli import (
    Formatter,
    add_options,
    config_fields,
    positive,
    progress_bar,
    run_command,
    try_to_write,
)
from milestone_llm.threads import ThreadWatch
from milestone_llm.lab.trace.text import plural

if TYPE_CHECKING:
    from .stress_report import StressReport
    from .stress_traffic import PlannedRequest, Traffic

PICTURE = "stress.png"


def parser(milestone: str) -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {milestone}.stress", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add("--concurrency", type=positive, default=128, help="most requests in the engine at once")
    add("--requests", type=positive, default=1000, help="in all, next turns included")
    add("--arrivals", choices=("poisson", "burst"), default="poisson", help="how they come")
    add("--rate", type=float, help="requests a step on average (default: concurrency / 20)")
    add("--no-invariants", action="store_true", help="do not check the books after each step")
    add_options(parser, "model", "seed", "max-model-len", "max-num-batched-tokens", "block-size")
    add_options(parser, "kv-cache-tokens", "preemption", "set", "threads", "explore", "json", "out")
    parser.set_defaults(model="tiny-llama", max_model_len=512, max_num_batched_tokens=512)
    return parser


def before(args: argparse.Namespace) -> None:
    """What can be refused at once.

    Raises:
        ValueError: a rate that is not above 0.
    """
    if args.rate is not None and not args.rate > 0:
        raise ValueError(f"--rate must be above 0 requests a step, got {args.rate:g}")
    for path in filter(None, (args.out / PICTURE, args.explore, args.json)):
        try_to_write(path)


def stress(args: argparse.Namespace, milestone: str) -> StressReport:
    """Build, run, report."""
    from milestone_llm.lab.demo import show
    from milestone_llm.lab.trace.explore import Run, write_page

    from . import stress_plot, stress_report, stress_traffic

    engine = importlib.import_module(milestone).LLMEngine(
        args.model,
        max_num_seqs=args.concurrency,
        max_model_len=args.max_model_len,
        max_num_batched_tokens=args.max_num_batched_tokens,
        block_size=args.block_size,
        kv_cache_tokens=args.kv_cache_tokens or max(args.max_model_len, 32 * args.concurrency),
        preemption=args.preemption,
        policy="priority",
        seed=args.seed,
        check_invariants=not args.no_invariants,
        trace="memory" if args.explore else None,
        **config_fields(args.set),
    )
    traffic = stress_traffic.Traffic(
        num_requests=args.requests,
        vocab_size=engine.vocab_size,
        max_model_len=args.max_model_len,
        arrivals=args.arrivals,
        rate=args.rate or args.concurrency / 20,
        burst_size=args.concurrency,
        seed=args.seed,
    )
    report = stress_report.StressReport(engine, args.requests)
    serve(traffic, args.concurrency, report)
    report.close()
    stress_report.print_report(report, args)
    if args.json:
        args.json.write_text(json.dumps(report.as_data(), indent=2) + "\n", encoding="utf-8")
        show.written("\nwritten", args.json)
    if report.samples:
        stress_plot.draw_stress(report, args.out / PICTURE)
        show.written("\npicture", args.out / PICTURE)
    if args.explore:
        write_page([Run.of("stress", engine)], args.explore)
        show.written("\npage", args.explore)
    return report


def serve(traffic: Traffic, concurrency: int, report: StressReport) -> None:
    """Serve all traffic. A client that finds no free connection waits outside, in order of arrival.

    An invariant that does not hold ends the run; the report says in which step.
    """
    outside: deque[PlannedRequest] = deque()
    inside: dict[str, PlannedRequest] = {}
    aborts: dict[str, int] = {}
    engine, step = report.engine, 0
    bar, watch = progress_bar(), ThreadWatch(engine.model.device.type)
    task = bar.add_task("stress", total=report.num_requests, count="")
    try:
        bar.start()
        while inside or outside or not traffic.is_over:
            outside += traffic.due(step)
            while outside and len(inside) < concurrency:
                planned = outside.popleft()
                name = engine.add_request(planned.prompt, planned.params, priority=planned.priority)
                inside[name] = planned
                if planned.abort_after is not None:
                    aborts[name] = step + planned.abort_after
            changed = [engine.abort(name) for name, when in aborts.items() if when <= step]
            if engine.has_unfinished_requests():
                start = time.perf_counter()
                changed += engine.step()
                report.sample(start)
                watch.note_step(time.perf_counter() - start, len(changed))
            for output in changed:
                if output.finished and output.request_id in inside:
                    planned = inside.pop(output.request_id)
                    aborts.pop(output.request_id, None)
                    report.add(output)
                    if output.finish_reason in ("stop", "length"):
                        traffic.finished(planned, output, step)
            count = f"{report.num_ended} of {plural(report.num_requests, 'request')}"
            bar.update(task, completed=report.num_ended, count=count)
            step += 1
    except AssertionError as error:
        report.broken = f"step {step}: {error}"
    finally:
        bar.stop()


def main(arguments: Sequence[str] | None = None, milestone: str = "m4_prefix_chunked") -> int:
    """The command line, for the engine of this milestone. Returns the exit status."""
    reports: list[StressReport] = []
    args = parser(milestone).parse_args(arguments)
    status = run_command(lambda args: reports.append(stress(args, milestone)), args, before)
    return status or int(not reports[0].is_good)


if __name__ == "__main__":
    sys.exit(main())
