"""The bench of KV layouts: slots of `max_model_len` tokens against blocks, on the same memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from milestone_llm.bench.command import Bench
from milestone_llm.bench.contest import Contest, Tables
from milestone_llm.bench.measure import Figures, engine_contestant
from milestone_llm.bench.report import THROUGHPUT
from milestone_llm.trace.kv_figures import KVFigures
from milestone_llm.trace.text import plural

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


def compare_layouts(bench: Bench) -> None:
    """Run the contest.

    Raises:
        ValueError: the memory holds not even one request of `max_model_len`.
    """
    args = bench.args
    items = bench.make_work()
    num_slots, num_seqs, num_tokens = shares(args, bench.limits(items)["max_num_seqs"])
    max_num_batched_tokens = max(args.max_num_batched_tokens, args.max_model_len)
    limits = {"max_num_batched_tokens": max_num_batched_tokens}
    engines, about = {}, {}
    if args.layout != "slot":
        engines["block"] = bench.engine(
            items,
            max_num_seqs=num_seqs,
            kv_cache_tokens=num_tokens,
            block_size=args.block_size,
            preemption=args.preemption,
            **limits,
        )
        num_blocks = num_tokens // args.block_size
        about["block"] = (
            f"m3_paged, {plural(num_blocks, 'block')} of {args.block_size}: "
            f"{num_blocks * args.block_size:,} tokens of KV; max_num_seqs={num_seqs}, "
            f"max_model_len={args.max_model_len}, {args.preemption}"
        )
    if args.layout != "block":
        engines["slot"] = bench.engine(items, "m2_batching", max_num_seqs=num_slots, **limits)
        about["slot"] = (
            f"m2_batching, {plural(num_slots, 'slot')} of max_model_len={args.max_model_len}: "
            f"{num_slots * args.max_model_len:,} tokens of KV"
        )
    contestants = [engine_contestant(engines[name], name, kv_facts) for name in engines]
    bench.run(Contest(args.workload, items, contestants, TABLES, remarks, about=about))


def shares(args: argparse.Namespace, max_num_seqs: int) -> tuple[int, int, int]:
    """How many slots, rows of blocks and tokens of KV memory there are.

    Raises:
        ValueError: the memory holds not even one request of `max_model_len`.
    """
    num_tokens = args.kv_cache_tokens or 4 * args.max_model_len
    if args.equal_concurrency:
        blocks_a_request = -(-args.max_model_len // args.block_size)
        num_tokens = max_num_seqs * blocks_a_request * args.block_size
    num_slots = min(num_tokens // args.max_model_len, max_num_seqs)
    if num_slots < 1:
        raise ValueError(
            f"{num_tokens} tokens of KV memory hold no request of max_model_len="
            f"{args.max_model_len}: raise --kv-cache-tokens or lower --max-model-len"
        )
    return num_slots, max_num_seqs, num_tokens


def kv_facts(outputs: Sequence[Any], records: Sequence[Any]) -> Figures:
    """How KV memory was used over all steps of a run."""
    figures = KVFigures.of(records)
    numbers = {name: value for name, value in asdict(figures).items() if name != "unit"}
    return {**numbers, "waste_share": figures.waste_share}


def remarks(data: dict[str, Any]) -> list[str]:
    """What the comparison shows."""
    lines = []
    medians = {name: own["median"] for name, own in data["contestants"].items()}
    if len(medians) == 2:
        ratio = medians["block"]["max_concurrent"] / medians["slot"]["max_concurrent"]
        speedup = data["speedups"]["slot"]
        lines.append(
            f"blocks serve {ratio:.2f}x the requests at a time and {speedup['median']:.2f}x the "
            f"tokens a second of slots ({min(speedup['rounds']):.2f}x to "
            f"{max(speedup['rounds']):.2f}x by round)"
        )
    if "block" in medians:
        size = data["engines"]["block"]["block_size"]
        lines.append(
            f"a block of {size} may waste half a block and one slot a request, {size / 2 + 1:g} "
            f"tokens: it wasted {medians['block']['waste_per_request']:.1f}"
        )
    return lines
