"""Three requests, batched anew at every step: `python -m m2_batching.demo`

The batch falls from 3 rows to 2 to 1 as requests finish; static batching (M1) serves the same
requests beside it and pads. To see more:

  --arrivals 0,0,12                        one comes when the others are under way
  --rate 2                                 they come at random, 2 a second on average
  --max-num-seqs 1 --policy priority --priorities 2,0,1
                                           the most urgent first
  --max-num-batched-tokens 64,2048         a small step budget against a large one
  --profile                                where the time goes
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from rich.table import Table
from rich.text import Text

import m1_single
from milestone_llm.bench.command import positive
from milestone_llm.bench.workloads import WorkItem, with_poisson_arrivals
from milestone_llm.cli import console, run_command
from milestone_llm.demo import kit as demo_kit
from milestone_llm.demo.kit import DemoRun
from milestone_llm.engine.inputs import encode_prompt
from milestone_llm.models.checkpoint import LoadedModel, load_model, max_position

from .engine import LLMEngine

T = TypeVar("T", int, float)


def numbers_of(kind: Callable[[str], T], minimum: int) -> Callable[[str], list[T]]:
    """An argparse type: numbers separated by commas, none below `minimum`."""

    def parse(text: str) -> list[T]:
        values = [kind(part) for part in text.split(",")]
        if min(values) < minimum:
            raise argparse.ArgumentTypeError(f"{min(values)} is below {minimum}")
        return values

    parse.__name__ = "list of numbers"
    return parse


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = demo_kit.base_parser("m2_batching", __doc__)
    add = parser.add_argument
    arrivals = parser.add_mutually_exclusive_group()
    arrivals.add_argument(
        "--arrivals",
        type=numbers_of(int, 0),
        metavar="STEP,...",
        help="step before which each request comes (default: 0 for all)",
    )
    arrivals.add_argument(
        "--rate", type=float, metavar="R", help="requests a second, at random (Poisson)"
    )
    add("--policy", choices=("fcfs", "priority"), default="fcfs", help="who is served first")
    add(
        "--priorities",
        type=numbers_of(int, -(10**9)),
        metavar="P,...",
        help="of each request, lower is sooner (default with --policy priority: last comes first)",
    )
    add(
        "--max-num-batched-tokens",
        type=numbers_of(int, 1),
        metavar="N[,N...]",
        help="tokens of a step (default: 2048); several are run one after the other and compared",
    )
    add(
        "--max-model-len",
        type=positive,
        metavar="N",
        help="tokens that a KV slot holds (default: what the longest request needs)",
    )
    add("--no-static", action="store_true", help="leave static batching out")
    add("--profile", action="store_true", help="print the 20 costliest functions")
    return parser


def demo(args: argparse.Namespace) -> None:
    """Serve the requests with each engine; show steps, text, comparison and timelines."""
    loaded = load_model(args.model)
    vocab_size = loaded.model.config.get_text_config().vocab_size
    items = arriving(demo_kit.work_items(args, loaded.tokenizer, vocab_size), args)
    is_chat = demo_kit.is_chat_model(loaded.tokenizer)
    budgets = list(dict.fromkeys(args.max_num_batched_tokens or [2048]))
    args.max_model_len = args.max_model_len or longest_request(items, loaded, is_chat)
    runs = []
    if not args.no_static:
        engine = m1_single.LLMEngine(
            loaded.model, tokenizer=loaded.tokenizer, max_num_seqs=args.max_num_seqs
        )
        runs.append(demo_kit.serve_with_progress(engine, items, is_chat, "static"))
    profiler = cProfile.Profile() if args.profile else None
    for budget in budgets:
        label = "continuous" if len(budgets) == 1 else f"budget {budget}"
        engine = build_engine(loaded, args, budget, is_first=budget == budgets[0])
        if profiler:
            profiler.enable()
        run = demo_kit.serve_with_progress(engine, items, is_chat, label)
        if profiler:
            profiler.disable()
        if budget == budgets[0]:
            demo_kit.print_trace(run, engine)
            demo_kit.print_answers(items, run.outputs)
        runs.append(run)
    demo_kit.print_requests(runs)
    demo_kit.print_summary(runs)
    print_remarks(args, items, runs)
    if profiler:
        print_profile(profiler)
    demo_kit.write_timeline(runs, args.out / "m2_timeline.png")


def build_engine(
    loaded: LoadedModel, args: argparse.Namespace, budget: int, is_first: bool
) -> LLMEngine:
    """A continuously batching engine; only the first one's trace is written."""
    return LLMEngine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=args.max_model_len,
        policy=args.policy,
        trace=args.trace if is_first else None,
    )


def longest_request(items: Sequence[WorkItem], loaded: LoadedModel, is_chat: bool) -> int:
    """Tokens of the longest request, prompt and output; no more than the model has positions for.

    What no request needs, a slot need not reserve.
    """
    longest = max(
        len(encode_prompt(loaded.tokenizer, item.prompt, is_chat)) + item.params.max_tokens
        for item in items
    )
    return min(longest, max_position(loaded.model) or longest)


def arriving(items: Sequence[WorkItem], args: argparse.Namespace) -> list[WorkItem]:
    """The requests with the arrivals and priorities that the options give them.

    Raises:
        ValueError: not one arrival or priority a request, or a rate that is not above 0.
    """
    items = list(items)
    priorities = args.priorities
    if priorities is None and args.policy == "priority":
        priorities = list(range(len(items)))[::-1]
    for name, values in (("arrivals", args.arrivals), ("priorities", priorities)):
        if values is not None and len(values) != len(items):
            raise ValueError(f"--{name} has {len(values)} numbers for {len(items)} requests")
    if args.arrivals is not None:
        items = [
            replace(item, arrival_step=step)
            for item, step in zip(items, args.arrivals, strict=True)
        ]
    if priorities is not None:
        items = [
            replace(item, priority=priority)
            for item, priority in zip(items, priorities, strict=True)
        ]
    if args.rate is not None:
        if not args.rate > 0:
            raise ValueError(f"--rate must be above 0 requests a second, got {args.rate:g}")
        items = with_poisson_arrivals(items, args.rate, args.seed)
    return items


def print_remarks(
    args: argparse.Namespace, items: Sequence[WorkItem], runs: Sequence[DemoRun]
) -> None:
    """What the comparison shows, and what it cannot show."""
    lines = []
    tokens = [[output.token_ids for output in run.outputs] for run in runs]
    if len(runs) > 1 and all(each == tokens[0] for each in tokens):
        lines.append("All of these runs gave the same tokens.")
    if args.policy == "priority" and args.max_num_seqs >= len(items):
        lines.append(
            f"All {len(items)} requests fit into one step, so priorities changed little: "
            "try --max-num-seqs 1."
        )
    if args.profile:
        lines.append("Times are those of a profiled run, which is slower.")
    if lines:
        console.print()
    for line in lines:
        console.print(line)


def print_profile(profiler: cProfile.Profile, num_functions: int = 20) -> None:
    """The functions that took most time themselves, without what they called."""
    stats = pstats.Stats(profiler)
    table = Table(
        title=f"The {num_functions} costliest functions (own: without what they call)",
        title_justify="left",
        title_style="bold",
        box=None,
        header_style="bold",
    )
    for name in ("calls", "own ms", "total ms"):
        table.add_column(name, justify="right", min_width=8)
    table.add_column("function", no_wrap=True, overflow="ellipsis")
    # Keys are (file, line, function), values (primitive calls, calls, own, total, callers).
    entries = stats.stats.items()  # type: ignore[attr-defined]
    costliest = sorted(entries, key=lambda entry: -entry[1][2])[:num_functions]
    for (file, line, function), (_, calls, own, total, _) in costliest:
        is_builtin = file.startswith(("~", "<"))
        where = "" if is_builtin else f"{Path(file).parent.name}/{Path(file).name}:{line} "
        table.add_row(
            f"{calls:,}", f"{own * 1e3:,.1f}", f"{total * 1e3:,.1f}", Text(where + function)
        )
    console.print()
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_command(demo, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
