"""The demo's maps of the block pool, and a summary of the run."""

from __future__ import annotations

from collections.abc import Sequence

from milestone_llm.cli import console
from milestone_llm.lab.demo import show
from milestone_llm.lab.demo.work import DemoRun
from milestone_llm.lab.plots.block_history import block_history
from milestone_llm.lab.plots.block_map import print_block_map
from milestone_llm.lab.plots.timeline_spans import arrival_order
from milestone_llm.lab.trace.kv_figures import KVFigures
from milestone_llm.lab.trace.records import StepRecord
from milestone_llm.lab.trace.text import plural


def steps_to_map(records: Sequence[StepRecord]) -> dict[int, str]:
    """Index of each record that is worth a map, and what to look at there."""

    def first(condition: list[bool]) -> list[int]:
        return [condition.index(True)] if any(condition) else []

    copied = first([any(e.type == "copy_on_write" for e in record.events) for record in records])
    preempted = first([bool(record.preempted) for record in records])
    resumed = first([bool(record.resumed) for record in records])
    fullest = max(range(len(records)), key=lambda index: records[index].kv.used)
    texts = {
        "The first step": [0],
        "Copy-on-write: a sharer writes into a shared block and gets its own": copied,
        "The pool is as good as full": [index - 1 for index in preempted],
        "A preemption: a block is needed and none is free": preempted,
        "A resumption: the preempted request is back": resumed,
        "The pool at its fullest": [] if preempted else [fullest],
    }
    found: dict[int, str] = {}
    for text, indices in texts.items():
        for index in indices:
            found.setdefault(index, text)
    return dict(sorted(found.items()))


def print_maps(run: DemoRun) -> None:
    """The steps that matter: what was computed, and whose each block was meanwhile."""
    records = [record.to_dict() for record in run.records]
    states, order = block_history(records), arrival_order(records)
    for index, text in steps_to_map(run.records).items():
        show.step(run, run.records[index], text)
        print_block_map(states[index], order, console)


def print_memory(run: DemoRun) -> None:
    """What the pool went through, and what slots would have made of the same memory."""
    figures, size = KVFigures.of(run.records), run.engine.config.block_size
    num_tokens, longest = figures.total * size, run.engine.max_model_len
    show.headline("KV memory")
    show.facts(
        {
            "pool": f"{plural(figures.total, 'block')} of {size}, {num_tokens:,} tokens",
            "requests at a time": f"{figures.max_concurrent}; in slots of "
            f"max_model_len={longest} tokens: {num_tokens // longest}",
            "watermark": plural(run.engine.stats()["kv"]["watermark"], "block"),
            "reserved, but empty": f"{figures.waste_share:.1%} of the places, "
            f"{figures.waste_per_request:.1f} a request on average",
            "preemptions": f"{figures.num_preemptions}, {figures.num_resumptions} resumed: "
            f"{plural(figures.num_recomputed_tokens, 'token')} recomputed, "
            f"{plural(figures.num_swapped_blocks, 'block')} swapped out",
            "copies on write": plural(figures.num_copies, "block"),
        }
    )
