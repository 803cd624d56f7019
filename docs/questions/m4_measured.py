"""What do caching and chunking gain, and when do they lose? `python -m docs.questions.m4_measured`

  prefix   eight requests with one system prompt, caching on and off; and requests with nothing in
           common, to see what looking into the cache costs, beside M3
  stall    a long prompt comes while others decode, under both prefill policies

Contestants take turns in every round.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from milestone_llm.cli import positive
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.command import bench_command
from milestone_llm.lab.bench.report import THROUGHPUT
from milestone_llm.lab.bench.workloads import WorkItem, exactly

ON, OFF = "caching on", "caching off"


def prefix(bench: Any) -> None:
    """Serve prompts with an equal beginning, eight steps apart, so that almost none queues; then
    others."""
    tokens = partial(random.Random(bench.args.seed).choices, range(bench.loaded.vocab_size))
    system_prompt = tokens(k=bench.args.system_prompt_tokens)
    items = [
        WorkItem(system_prompt + tokens(k=24), exactly(32), arrival_step=8 * i)
        for i in range(bench.args.num_requests or 8)
    ]
    columns = {
        "TTFT of\nthe first": "{ttft_first}",
        "TTFT of\nthe later": "{ttft_later}",
        "prompt tokens\nsaved": "{saved_tokens}",
        "seconds": "{seconds:.2f}",
    }
    title = f"shared: {len(system_prompt)} prompt tokens in common"
    engines = caching_on_and_off(bench, items)
    bench.compare(title, items, engines, tables={"Times in ms{of_rounds}": columns}, facts=found)

    items = bench.make_work()
    engines = caching_on_and_off(bench, items)
    engines["m3_paged"] = bench.engine(items, "m3_paged")
    title, tables = f"nothing shared: {bench.args.workload}", {"Throughput{of_rounds}": THROUGHPUT}
    bench.compare(title, items, engines, tables=tables, facts=found)


def found(outputs: Sequence[Any], records: Sequence[Any]) -> dict[str, float]:
    """Return the figures of the prefix cache."""
    ttft = [1e3 * (output.metrics.ttft or 0.0) for output in outputs]
    saved = sum(output.metrics.num_cached_tokens for output in outputs)
    later = statistics.median(ttft[1:] or ttft)
    return {"ttft_first": ttft[0], "ttft_later": later, "saved_tokens": saved}


def caching_on_and_off(bench: Any, items: Sequence[WorkItem]) -> dict[str, Any]:
    """Compare two engines that differ in `enable_prefix_caching`. Each run begins with an empty
    cache."""
    switches = {ON: True, OFF: False}
    return {name: bench.engine(items, enable_prefix_caching=on) for name, on in switches.items()}


def stall(bench: Any) -> None:
    """Let a long prompt come while others decode."""
    args = bench.args
    num_running = (args.num_requests or 9) - 1
    if num_running < 1:
        raise InputError("stall needs at least 2 requests: one that waits for another")
    tokens = partial(random.Random(args.seed).choices, range(bench.loaded.vocab_size))
    items = [WorkItem(tokens(k=24), exactly(64)) for _ in range(num_running)]
    long_prompt = tokens(k=args.long_prompt_tokens)
    items.append(WorkItem(long_prompt, exactly(16), arrival_step=16))
    whole = max(args.max_num_batched_tokens, len(long_prompt) + num_running)
    engines = {
        name: bench.engine(
            items,
            prefill_policy=policy,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
        )
        for name, policy, budget in (
            (f"mixed, {args.chunk_tokens}", "mixed", args.chunk_tokens),
            ("prefill_first", "prefill_first", whole),
            (f"mixed, {whole:,}", "mixed", whole),
        )
    }

    def gaps(outputs: Sequence[Any], records: Sequence[Any]) -> dict[str, float]:
        from milestone_llm.lab.bench.measure import gap_figures

        ttft_long = 1e3 * (outputs[-1].metrics.ttft or 0.0)
        return {**gap_figures(outputs[:num_running]), "ttft_long": ttft_long}

    columns = {f"gap\n{which}": f"{{gap_{which}}}" for which in ("p50", "p99", "max")}
    columns |= {"TTFT of\nthe long one": "{ttft_long}", "seconds": "{seconds:.2f}"}
    title = f"stall: {len(long_prompt):,} prompt tokens come to {num_running} running"
    bench.compare(title, items, engines, tables={"Times in ms{of_rounds}": columns}, facts=gaps)


def run(bench: Any) -> None:
    """Run the comparisons of the command line."""
    if bench.args.baseline:
        raise InputError("--baseline goes with the benches of the milestones")
    {"prefix": prefix, "stall": stall}[bench.args.what](bench)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of both comparisons."""
    parser.set_defaults(rounds=3)
    parser.add_argument("what", choices=("prefix", "stall"))
    add = parser.add_argument_group("prompts").add_argument
    add("--system-prompt-tokens", type=positive, default=512, help="what prompts have in common")
    add("--long-prompt-tokens", type=positive, default=1500, help="of the one that comes later")
    add("--chunk-tokens", type=positive, default=256, help="budget of a step that cuts it")


PROGRAM = "docs.questions.m4_measured"
main = partial(bench_command, "m4_prefix_chunked", __doc__, run=run, prog=PROGRAM, options=options)

if __name__ == "__main__":
    sys.exit(main())
