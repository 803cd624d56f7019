"""Part 2 of the demo: a long prompt comes into running decodes, under both policies."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import m4_prefix_chunked
from milestone_llm.consoles import console
from milestone_llm.lab.bench.measure import gap_figures
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.bench.workloads import WorkItem, exactly
from milestone_llm.lab.demo import show
from milestone_llm.lab.demo.work import Work
from milestone_llm.models.checkpoint import LoadedModel, max_position
from milestone_llm.trace.text import plural

from .demo_texts import TALKS, chat_prompt, long_prompt

LATE = f"r{len(TALKS)}"
"""The request with the long prompt."""


def long_arrival(args: argparse.Namespace, loaded: LoadedModel, picture: Path) -> None:
    """Serve the same requests under both policies; compare the pauses."""
    is_tiny = loaded.tokenizer is None
    num_tokens = args.long_prompt_tokens or (400 if is_tiny else 1400)
    late = long_prompt(loaded, min(num_tokens, max_position(loaded.model) or num_tokens))
    items = [WorkItem(chat_prompt(loaded, talk, seed=talk), exactly(48)) for talk in TALKS]
    items.append(WorkItem(late, exactly(8), arrival_step=6))
    work = Work(args, loaded, items)
    args.max_model_len, args.enable_prefix_caching = work.longest, False  # only chunking, here
    budget = args.max_num_batched_tokens or (64 if is_tiny else 256)
    runs, gaps = [], []
    policies: dict[str, dict[str, Any]] = {
        name: {"prefill_policy": name} for name in ("mixed", "prefill_first")
    }
    if args.scheduler:
        policies = {"mixed": {"scheduler": None}, "yours": {}}
    for policy, changes in policies.items():
        changes["max_num_batched_tokens"] = budget
        if args.part != 2 or policy != ("yours" if args.scheduler else "mixed"):
            changes["trace"] = None  # one run a demo writes the trace
        run = work.run(policy, m4_prefix_chunked, **changes)
        runs.append(run)
        first = next(r for r in run.records if any(row.request_id == LATE for row in r.batch))
        show.step(run, first, f"{policy}: the long prompt's first chunk")
        *running, last = run.outputs
        times = [*gap_figures(running).values(), 1e3 * (last.metrics.ttft or 0)]
        gaps.append([policy, *(show.milliseconds(ms / 1e3) for ms in times)])
    show.headline(f"The {len(TALKS)} running requests: ms from one token to the next")
    console.print(table("", ["policy", "p50", "p99", "max", f"TTFT of {LATE}"], gaps))
    console.print(
        f"\nThe prompt of {LATE} has {plural(len(late), 'token')}, a step at most {budget}. "
        + " ".join(
            f"With {policy} the others waited {longest} ms at most, and {LATE} had its first token "
            f"after {first_token} ms."
            for policy, *_, longest, first_token in gaps
        )
    )
    show.summary(runs)
    # drawn over positions, a long pause is wide
    label = "{}" if args.scheduler else 'prefill_policy="{}"'
    show.timeline(runs, picture, by="positions", label=label)
    if args.explore and args.part is None:  # the first page is of part 1
        args.explore = args.explore.with_stem(f"{args.explore.stem}-2")
    show.page(runs, args.explore)
