"""What do caching and chunking buy, and where do they lose? `python -m m4_prefix_chunked.bench`

Without --scenario this is the bench that every milestone has; --baseline m3 compares with M3.

  --scenario prefix   eight requests with one system prompt, caching on and off; and requests with
                      nothing in common, to see what looking into the cache costs, beside M3
  --scenario stall    a long prompt comes while others decode, under both prefill policies

Contestants take turns in every round, and at every step where their steps are the same. Ratios are
those of rounds, and their median counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from m2_batching.bench import BASELINES as M2_BASELINES
from m4_prefix_chunked.tools.bench_report import print_contest, write_markdown
from m4_prefix_chunked.tools.bench_scenarios import SCENARIOS, m3_engine
from milestone_llm.bench.command import bench_parser, positive, run_bench
from milestone_llm.bench.measure import Contestant, engine_contestant
from milestone_llm.bench.workloads import WorkItem
from milestone_llm.cli import console, run_command
from milestone_llm.models.checkpoint import load_model

from .engine import LLMEngine


def m3_contestant(engine: LLMEngine, items: Sequence[WorkItem]) -> Contestant:
    """M3, beside the engine that is measured."""
    return engine_contestant(m3_engine(engine))


BASELINES = {**M2_BASELINES, "m3": m3_contestant}


def parser() -> argparse.ArgumentParser:
    """The options of all milestones' benches, and those of the scenarios."""
    parser = bench_parser(LLMEngine, BASELINES, __doc__)
    add = parser.add_argument_group("scenarios").add_argument
    add("--scenario", choices=sorted(SCENARIOS), help="instead of a workload")
    add("--system-prompt-tokens", type=positive, default=512, help="what prompts have in common")
    add("--long-prompt-tokens", type=positive, default=1500, help="of the one that comes later")
    add("--chunk-tokens", type=positive, default=256, help="budget of a step that cuts it")
    add("--markdown", type=Path, metavar="PATH", help="write the scenario's tables there")
    parser.set_defaults(rounds=3)
    return parser


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Run what was asked for.

    Returns:
        What `--json` writes.

    Raises:
        ValueError: bad options, or limits that do not fit the model.
    """
    if args.scenario is None:
        if args.markdown:
            raise ValueError("--markdown goes with --scenario; a workload has --json")
        return run_bench(LLMEngine, args, BASELINES)
    if args.threads:
        torch.set_num_threads(args.threads)
    loaded = load_model(args.model, dtype=args.dtype, device=args.device)
    contests = []
    for make_contest in SCENARIOS[args.scenario]:
        contest = make_contest(args, loaded)
        contest.run(args.rounds)
        print_contest(contest)
        contests.append(contest.as_data())
    data = {"scenario": args.scenario, "rounds": args.rounds, "contests": contests}
    if args.json:
        _write(args.json, json.dumps(data, indent=2) + "\n")
    if args.markdown:
        _write(args.markdown, write_markdown(contests))
    return data


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    console.print(f"\nwritten: {path}", markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_command(bench, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
