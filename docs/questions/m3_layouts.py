"""What do blocks gain? `python -m docs.questions.m3_layouts`

The same requests on the same KV memory, in regions (m2_batching) of max_model_len tokens and of the
longest request, and in blocks (m3_paged): how many run at a time, how fast they are served, and how
much memory is unused.

  --equal-concurrency          memory for all, so that both run the same requests at a time: what
                               reading KV through block tables costs
  --input-len 512 512 --output-len 1 512
                               requests of 512..1024 tokens: how little a block wastes then
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import TYPE_CHECKING

from milestone_llm.cli import add_options, positive
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.command import bench_command
from milestone_llm.lab.bench.report import THROUGHPUT, Tables
from milestone_llm.lab.explorer.kv_figures import kv_figures
from milestone_llm.trace.text import plural

if TYPE_CHECKING:
    from milestone_llm.lab.bench.compare import Bench

TABLES: Tables = {
    "Throughput{of_rounds}": {**THROUGHPUT, "requests\nat a time": "{max_concurrent:.0f}"},
    "KV memory, in tokens (empty: reserved, and no token in it)": {
        "reserved": "{reserved_tokens:,.0f}",
        "stored": "{stored_tokens:,.0f}",
        "empty\nshare": "{waste_share:.1%}",
        "empty\na request": "{waste_per_request:,.1f}",
        "peak used": "{peak_used:,.0f} of {total:,.0f}",
        "times\npreempted": "{num_preemptions:.0f}",
    },
    "Times of a request in ms (TTFT, latency: since the start of the run)": {
        f"{label}\n{part}": f"{{{label.lower()}_{part}}}"
        for label in ("TTFT", "TPOT", "latency")
        for part in ("mean", "p50", "p95")
    },
}


def layouts(bench: Bench) -> None:
    """Serve the same requests on the same KV memory, in regions and in blocks."""
    args, items = bench.args, bench.make_work()
    if args.baseline:
        raise InputError("--baseline goes with the benches of the milestones")
    size, limits = args.block_size, bench.limits(items)
    num_seqs, longest = limits["max_num_seqs"], limits["max_model_len"]
    num_tokens, lengths = args.kv_cache_tokens or 4 * longest, [longest]
    if args.equal_concurrency:
        num_tokens = num_seqs * -(-longest // size) * size
    else:  # and what nobody knows beforehand
        lengths.append(max(len(item.prompt) + item.params.max_tokens for item in items))
    if num_tokens < longest:
        raise InputError(
            f"{num_tokens} tokens of KV memory hold no request of max_model_len={longest}: raise "
            "--kv-cache-tokens or lower --max-model-len"
        )
    budget, num_blocks = max(args.max_num_batched_tokens, longest), num_tokens // size
    block = bench.engine(
        items,
        max_num_batched_tokens=budget,
        kv_cache_tokens=num_tokens,
        block_size=size,
        preemption=args.preemption,
    )
    engines = {"block": block}
    about = {
        "block": f"m3_paged, {plural(num_blocks, 'block')} of {size}: {num_blocks * size:,} tokens "
        f"of KV; max_num_seqs={num_seqs}, max_model_len={longest}, {args.preemption}"
    }
    for length in dict.fromkeys(lengths):
        name = "region" if length == longest else f"region, {length}"
        count = min(num_tokens // length, num_seqs)
        engines[name] = bench.engine(
            items,
            "m2_batching",
            max_model_len=length,
            max_num_seqs=count,
            max_num_batched_tokens=budget,
        )
        about[name] = (
            f"m2_batching, {plural(count, 'region')} of max_model_len={length}: "
            f"{count * length:,} tokens of KV"
        )
    bench.compare(
        args.workload,
        items,
        engines,
        tables=TABLES,
        facts=lambda outputs, records: kv_figures(records),
        about=about,
    )


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the comparison."""
    add_options(parser, "block-size", "preemption")
    parser.set_defaults(num_requests=32, max_model_len=1024, rounds=3)
    add = parser.add_argument_group("layouts").add_argument
    about = "KV memory of either layout (default: 4 regions, 4 * max_model_len)"
    add("--kv-cache-tokens", type=positive, metavar="N", help=about)
    add("--equal-concurrency", action="store_true", help="memory and rows for all, in both layouts")


PROGRAM = "docs.questions.m3_layouts"
main = partial(bench_command, "m3_paged", __doc__, run=layouts, prog=PROGRAM, options=options)

if __name__ == "__main__":
    sys.exit(main())
