"""Prefix caching and chunked prefill, each on and off: `python -m m4_prefix_chunked.demo`

1. Eight visitors ask the same library desk, so that eight prompts begin with the same house rules.
   The first pays for them, the others find them in the cache, which is drawn as the tree it is.
2. A long prompt comes while four requests decode: with prefill_policy="mixed" it is computed in
   chunks beside them, with "prefill_first" they stand still meanwhile.

To see more:

  --spacing 0                      all eight come at once: still only one pays
  --block-size 64                  what is shared ends at a full block
  --part 2 --max-num-batched-tokens 2048
                                   a budget so large that the whole prompt is one chunk
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from m4_prefix_chunked.tools.demo_report import (
    headline,
    print_cache_counts,
    print_gaps,
    print_same_tokens,
    print_savings,
    show_step,
)
from m4_prefix_chunked.tools.demo_work import LongPromptWork, chat_work, long_prompt_work
from m4_prefix_chunked.tools.prefix_tree import PrefixTree, print_prefix_tree
from milestone_llm.bench.command import positive
from milestone_llm.bench.workloads import WorkItem
from milestone_llm.cli import Formatter, console, run_command
from milestone_llm.demo import kit as demo_kit
from milestone_llm.demo.kit import DemoRun
from milestone_llm.engine.request import Request
from milestone_llm.engine.sampling_params import SamplingParams
from milestone_llm.models.checkpoint import LoadedModel, load_model
from milestone_llm.plots.timeline import draw_timeline
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.tracer import Tracer

from .engine import LLMEngine


def parser() -> argparse.ArgumentParser:
    """All options."""
    base = demo_kit.base_parser("m4_prefix_chunked", __doc__)
    parser = argparse.ArgumentParser(
        prog=base.prog,
        description=__doc__,
        formatter_class=Formatter,
        parents=[base],
        conflict_handler="resolve",  # some of the shared options mean something else here
    )
    add = parser.add_argument
    add("--part", type=int, choices=(1, 2), help="only this one (default: both)")
    add("--prompts", nargs="+", metavar="TEXT", help="your own questions (default: eight)")
    add("--system-prompt", metavar="TEXT", help="what all prompts begin with (default: rules)")
    add("--max-tokens", type=positive, default=24, metavar="N", help="output tokens at most")
    add(
        "--spacing",
        type=int,
        default=4,
        metavar="STEPS",
        help="steps from one request's arrival to the next one's, in part 1",
    )
    add(
        "--long-prompt-tokens",
        type=positive,
        metavar="N",
        help="of the prompt that comes later, in part 2 (default: 1,400; 400 for a tiny model)",
    )
    add(
        "--max-num-batched-tokens",
        type=positive,
        metavar="N",
        help="tokens of a step in part 2 (default: 256; 64 for a tiny model)",
    )
    add("--block-size", type=positive, default=16, metavar="N", help="tokens of a KV block")
    return parser


def demo(args: argparse.Namespace) -> None:
    """Run the parts that were asked for."""
    loaded = load_model(args.model)
    if args.spacing < 0:
        raise ValueError(f"--spacing must be at least 0 steps, got {args.spacing}")
    warm_up(loaded)
    if args.part != 2:
        shared_prefix(args, loaded)
    if args.part != 1:
        long_arrival(args, loaded)


def warm_up(loaded: LoadedModel) -> None:
    """Compute something else first: what a process does only once would be charged to r0."""
    params = SamplingParams(max_tokens=2)
    LLMEngine(loaded.model, max_model_len=128).generate([[5] * 64, [6] * 32], params)


# --- part 1: a shared prefix ------------------------------------------------------------------


class TreeKeeper:
    """A trace sink that keeps the prefix tree as it is after the latest admission."""

    def __init__(self, engine: LLMEngine) -> None:
        self.engine = engine
        self.requests: dict[str, Request] = {}
        self.tree: PrefixTree | None = None
        self.step = 0

    def __call__(self, record: StepRecord) -> None:
        """Take note of one step."""
        scheduler = self.engine.scheduler
        self.requests |= {request.request_id: request for request in scheduler.running}
        if record.admitted:
            self.tree = PrefixTree.of(scheduler.kv, self.requests.values())
            self.step = record.step


def shared_prefix(args: argparse.Namespace, loaded: LoadedModel) -> None:
    """Serve prompts with one beginning, cached and not; show who paid and what the cache holds."""
    vocab_size = loaded.model.config.get_text_config().vocab_size
    items, questions = chat_work(args, loaded.tokenizer, vocab_size)
    runs, engines = [], []
    for label, is_cached in (("cached", True), ("not cached", False)):
        engine = build_engine(
            args, loaded, items, is_traced=is_cached, enable_prefix_caching=is_cached
        )
        keeper = TreeKeeper(engine)
        assert engine.tracer is not None
        engine.tracer.sinks.append(keeper)
        runs.append(demo_kit.serve_with_progress(engine, items, False, label))
        engines.append((engine, keeper))
    engine, keeper = engines[0]
    cached = runs[0]
    hit = next((r for r in cached.records if any(b.num_cached_tokens for b in r.batch)), None)
    if not demo_kit.prints_steps(engine):
        show_step(cached.records[0], "The first request pays")
        if hit is not None:
            show_step(hit, "Another one finds its beginning in the cache")
    print_savings(runs)
    if keeper.tree is not None:
        headline(f"The prefix cache after step {keeper.step}, as a tree")
        print_prefix_tree(keeper.tree, console, loaded.tokenizer and loaded.tokenizer.decode)
    shown = [replace(item, prompt=text) for item, text in zip(items, questions, strict=True)]
    demo_kit.print_answers(shown, cached.outputs)
    demo_kit.print_summary(runs)
    print_cache_counts(engine)
    print_same_tokens(runs)
    write_timeline(runs, [run.label for run in runs], args.out / "m4_prefix.png")


# --- part 2: a long prompt --------------------------------------------------------------------


def long_arrival(args: argparse.Namespace, loaded: LoadedModel) -> None:
    """Let a long prompt come into running decodes under both policies; compare the pauses."""
    work = long_prompt_work(args, loaded.tokenizer, loaded.model)
    runs = []
    for policy in ("mixed", "prefill_first"):
        engine = build_engine(
            args,
            loaded,
            work.items,
            is_traced=policy == "mixed" and args.part == 2,
            prefill_policy=policy,
            enable_prefix_caching=False,  # the two are independent: here only one is looked at
            max_num_batched_tokens=work.budget,
        )
        run = demo_kit.serve_with_progress(engine, work.items, False, policy)
        runs.append(run)
        first = next(r for r in run.records if long_row(r, work))
        if not demo_kit.prints_steps(engine):
            show_step(first, f"{policy}: the long prompt's first chunk")
    print_gaps(runs, work)
    demo_kit.print_summary(runs)
    print_same_tokens(runs)
    labels = [f'prefill_policy="{run.label}"' for run in runs]
    write_timeline(runs, labels, args.out / "m4_timeline.png")


def long_row(record: StepRecord, work: LongPromptWork) -> bool:
    """Whether a step computes a part of the long prompt."""
    return any(row.request_id == f"r{work.num_victims}" for row in record.batch)


# --- both ---------------------------------------------------------------------------------------


def write_timeline(runs: Sequence[DemoRun], labels: list[str], path: Path) -> None:
    """Draw two runs on one axis of seconds: there a pause is as wide as it was long."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draw_timeline([[r.to_dict() for r in run.records] for run in runs], labels, path, by="time")
    console.print()
    console.print(f"timeline: {path}", markup=False, soft_wrap=True)


def build_engine(
    args: argparse.Namespace,
    loaded: LoadedModel,
    items: Sequence[WorkItem],
    is_traced: bool,
    **fields: Any,
) -> LLMEngine:
    """An engine for these requests, with a tracer; only the first of the demo writes `--trace`."""
    engine = LLMEngine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        max_num_seqs=args.max_num_seqs,
        block_size=args.block_size,
        max_model_len=max(len(item.prompt) + item.params.max_tokens for item in items),
        trace=args.trace if is_traced else None,
        **fields,
    )
    engine.tracer = engine.tracer or Tracer()
    return engine


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_command(demo, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
