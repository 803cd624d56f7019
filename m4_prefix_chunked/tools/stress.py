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
import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from m4_prefix_chunked.engine import LLMEngine
from milestone_llm.bench.command import config_fields, positive
from milestone_llm.cli import Formatter, console, progress_bar, run_command
from milestone_llm.engine.outputs import RequestOutput

from .stress_plot import draw_stress
from .stress_report import Sample, StressReport, print_report, resident_bytes
from .stress_traffic import PlannedRequest, Traffic


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog="python -m m4_prefix_chunked.stress", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add("--model", default="tiny-llama", help="HF id, folder, GGUF file or tiny-llama")
    add("--concurrency", type=positive, default=128, help="most requests in the engine at once")
    add("--requests", type=positive, default=1000, help="in all, next turns included")
    add("--seed", type=int, default=0, help="of the traffic and of sampling")
    add("--arrivals", choices=("poisson", "burst"), default="poisson", help="how they come")
    add("--rate", type=float, help="requests a step on average (default: concurrency / 20)")
    add("--max-model-len", type=positive, default=512, help="tokens of a request")
    add("--max-num-batched-tokens", type=positive, default=512, help="tokens of a step")
    add("--block-size", type=positive, default=16, help="tokens of a KV block")
    add(
        "--kv-cache-tokens",
        type=positive,
        help="KV memory (default: 32 a connection, a third of what they would use)",
    )
    add("--preemption", choices=("recompute", "swap"), default="recompute", help="of a victim's KV")
    add("--no-invariants", action="store_true", help="do not check the books after each step")
    add("--set", nargs="+", default=[], metavar="FIELD=VALUE", help="further fields of the config")
    add("--json", type=Path, metavar="PATH", help="write the report there")
    add("--out", type=Path, default=Path("runs"), metavar="FOLDER", help="where the picture goes")
    return parser


def stress(args: argparse.Namespace) -> StressReport:
    """Build, run, report."""
    if args.rate is not None and not args.rate > 0:
        raise ValueError(f"--rate must be above 0 requests a step, got {args.rate:g}")
    engine = build_engine(args)
    traffic = Traffic(
        num_requests=args.requests,
        vocab_size=engine.vocab_size,
        max_model_len=args.max_model_len,
        arrivals=args.arrivals,
        rate=args.rate or args.concurrency / 20,
        burst_size=args.concurrency,
        seed=args.seed,
    )
    report = StressReport(engine, args.requests)
    with progress_bar() as bar:
        task = bar.add_task("stress", total=args.requests, count="")

        def on_step() -> None:
            count = f"{report.num_ended} of {args.requests} requests"
            bar.update(task, completed=report.num_ended, count=count)

        run(engine, traffic, args.concurrency, report, on_step)
    report.close()
    print_report(report, args)
    picture = args.out / "m4_stress.png"
    draw_stress(report, picture)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(report.as_data(), indent=2) + "\n", encoding="utf-8")
        console.print(f"\nwritten: {args.json}", soft_wrap=True)
    console.print(f"\npicture: {picture}", markup=False, soft_wrap=True)
    return report


def build_engine(args: argparse.Namespace) -> LLMEngine:
    """An engine with too little KV memory for all connections."""
    return LLMEngine(
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
        **config_fields(args.set),
    )


def run(
    engine: LLMEngine,
    traffic: Traffic,
    concurrency: int,
    report: StressReport,
    on_step: Callable[[], None],
) -> None:
    """Serve all traffic. Who finds no free connection waits outside, in order of arrival.

    An invariant that does not hold ends the run; the report says in which step.
    """
    outside: deque[PlannedRequest] = deque()
    inside: dict[str, PlannedRequest] = {}
    aborts: dict[str, int] = {}

    def ended(output: RequestOutput, step: int) -> None:
        planned = inside.pop(output.request_id)
        aborts.pop(output.request_id, None)
        report.add(output)
        if output.finish_reason in ("stop", "length"):
            traffic.finished(planned, output, step)

    step = 0
    try:
        while inside or outside or not traffic.is_over:
            outside += traffic.due(step)
            while outside and len(inside) < concurrency:
                planned = outside.popleft()
                name = engine.add_request(planned.prompt, planned.params, priority=planned.priority)
                inside[name] = planned
                if planned.abort_after is not None:
                    aborts[name] = step + planned.abort_after
            for name in [name for name, when in aborts.items() if when <= step]:
                output = engine.abort(name)
                assert output is not None, f"{name} is in the engine"
                ended(output, step)
            if engine.has_unfinished_requests():
                start = time.perf_counter()
                outputs = engine.step()
                report.samples.append(Sample.of(engine, start))
                for output in outputs:
                    if output.finished and output.request_id in inside:
                        ended(output, step)
                on_step()
            step += 1
    except AssertionError as error:
        report.broken = f"step {step}: {error}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    reports: list[StressReport] = []
    resident_bytes()  # before anything is measured
    status = run_command(lambda args: reports.append(stress(args)), parser().parse_args(arguments))
    return status or int(not reports[0].is_good)


if __name__ == "__main__":
    sys.exit(main())
