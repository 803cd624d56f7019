"""The bench of KV layouts: slots of `max_model_len` tokens against blocks, on the same memory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from milestone_llm.lab.bench.command import Bench
from milestone_llm.lab.bench.contest import Contest, Tables
from milestone_llm.lab.bench.measure import Figures, engine_contestant
from milestone_llm.lab.bench.report import THROUGHPUT
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.lab.trace.kv_figures import KVFigures
from milestone_llm.lab.trace.text import plural

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
    num_seqs = bench.limits(items)["max_num_seqs"]
    num_tokens = kv_tokens(args, num_seqs)
    slots_in(num_tokens, args.max_model_len, num_seqs)  # or blocks hold none either
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
        for length in slot_lengths(args, items):
            name = "slot" if length == args.max_model_len else f"slot, {length}"
            num_slots = slots_in(num_tokens, length, num_seqs)
            engines[name] = bench.engine(
                items, "m2_batching", max_num_seqs=num_slots, max_model_len=length, **limits
            )
            about[name] = (
                f"m2_batching, {plural(num_slots, 'slot')} of max_model_len={length}: "
                f"{num_slots * length:,} tokens of KV"
            )
    contestants = [engine_contestant(engines[name], name, kv_facts) for name in engines]
    bench.run(Contest(args.workload, items, contestants, TABLES, remarks, about=about))


def slot_lengths(args: argparse.Namespace, items: Sequence[WorkItem]) -> list[int]:
    """Tokens of a slot, one engine each.

    Raises:
        ValueError: a request is longer.
    """
    if args.equal_concurrency:
        return [args.max_model_len]
    longest = max(len(item.prompt) + item.params.max_tokens for item in items)
    lengths = args.slot_len or [args.max_model_len, longest]
    if min(lengths) < longest:
        raise ValueError(f"--slot-len {min(lengths)}: the longest request has {longest} tokens")
    return list(dict.fromkeys(lengths))


def kv_tokens(args: argparse.Namespace, max_num_seqs: int) -> int:
    """Tokens of KV memory, the same for all."""
    if args.equal_concurrency:
        return int(max_num_seqs * -(-args.max_model_len // args.block_size) * args.block_size)
    return int(args.kv_cache_tokens or 4 * args.max_model_len)


def slots_in(num_tokens: int, length: int, max_num_seqs: int) -> int:
    """How many slots of `length` tokens there are.

    Raises:
        ValueError: not even one.
    """
    num_slots = min(num_tokens // length, max_num_seqs)
    if num_slots < 1:
        raise ValueError(
            f"{num_tokens} tokens of KV memory hold no request of max_model_len={length}: raise "
            "--kv-cache-tokens or lower --max-model-len"
        )
    return num_slots


def kv_facts(outputs: Sequence[Any], records: Sequence[Any]) -> Figures:
    """How KV memory was used over all steps of a run."""
    figures = KVFigures.of(records)
    numbers = {name: value for name, value in asdict(figures).items() if name != "unit"}
    return {**numbers, "waste_share": figures.waste_share}


def remarks(data: dict[str, Any]) -> list[str]:
    """What the comparison shows."""
    lines = []
    medians = {name: own["median"] for name, own in data["contestants"].items()}
    for name in list(medians)[1:] if "block" in medians else []:
        ratio = medians["block"]["max_concurrent"] / medians[name]["max_concurrent"]
        speedup = data["speedups"][name]
        length = data["engines"][name]["max_model_len"]
        lines.append(
            f"blocks serve {ratio:.2f}x the requests at a time and {speedup['median']:.2f}x the "
            f"tokens a second of slots of {length} ({min(speedup['rounds']):.2f}x to "
            f"{max(speedup['rounds']):.2f}x by round)"
        )
    if "block" in medians:
        size = data["engines"]["block"]["block_size"]
        lines.append(
            f"a block of {size} may waste half a block and one slot a request, {size / 2 + 1:g} "
            f"tokens: it wasted {medians['block']['waste_per_request']:.1f}"
        )
    return lines
