"""Part 2 of the demo: a long prompt comes into running decodes, under both policies."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import m4_prefix_chunked
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.cli import console
from milestone_llm.lab.demo import show
from milestone_llm.lab.demo.work import DemoRun, Work
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.lab.trace.text import plural

from .demo_texts import TALKS, chat_prompt, long_prompt
from .gaps import GapFigures

LATE = f"r{len(TALKS)}"
"""The request with the long prompt."""
ARRIVAL_STEP, ANSWER_TOKENS, LATE_ANSWER_TOKENS = 6, 48, 8


def long_arrival(args: argparse.Namespace, loaded: LoadedModel, picture: Path) -> None:
    """Serve the same requests under both policies; compare the pauses."""
    is_tiny = loaded.tokenizer is None
    prompts = [chat_prompt(loaded, talk, seed=talk) for talk in TALKS]
    prompts.append(long_prompt(loaded, args.long_prompt_tokens or (400 if is_tiny else 1400)))
    work = Work(args, loaded, [])
    for prompt in prompts:
        is_late = prompt is prompts[-1]
        max_tokens = LATE_ANSWER_TOKENS if is_late else ANSWER_TOKENS
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        work.items.append(WorkItem(prompt, params, arrival_step=ARRIVAL_STEP * is_late))
    args.max_model_len, args.enable_prefix_caching = work.longest, False  # only chunking, here
    budget = args.max_num_batched_tokens or (64 if is_tiny else 256)
    runs = []
    for policy in ("mixed", "prefill_first"):
        changes: dict[str, Any] = {"prefill_policy": policy, "max_num_batched_tokens": budget}
        if policy != "mixed" or args.part != 2:
            changes["trace"] = None  # one run a demo writes the trace
        run = work.run(policy, m4_prefix_chunked, **changes)
        runs.append(run)
        first = next(r for r in run.records if any(row.request_id == LATE for row in r.batch))
        show.step(run, first, f"{policy}: the long prompt's first chunk")
    print_gaps(runs)
    console.print(
        f"\nThe prompt of {LATE} has {plural(len(prompts[-1]), 'token')}, a step at most "
        f"{budget}. Chunks in mixed steps spare the others the pause; the long prompt itself "
        "gets its first token a little later for it."
    )
    show.summary(runs)
    show.timeline(runs, picture, by="time", label='prefill_policy="{}"')
    if args.explore and args.part is None:  # the first page is of part 1
        args.explore = args.explore.with_stem(f"{args.explore.stem}-2")
    show.page(runs, args.explore)


def print_gaps(runs: list[DemoRun]) -> None:
    """How long the running requests waited from one token to the next."""
    show.headline(f"The {len(TALKS)} running requests: ms from one token to the next")
    rows = []
    for run in runs:
        *running, late = run.outputs
        gaps = GapFigures.of(running)
        seconds = (gaps.p50, gaps.p99, gaps.longest, late.metrics.ttft)
        rows.append([run.label, *map(show.milliseconds, seconds)])
    show.table(["policy", "p50", "p99", "max", f"TTFT of {LATE}"], rows)
