"""M1 to M5 answer the same four questions: `python -m milestone_llm.lab.demo`

The model answers one of them word by word. Then each milestone serves all four in the memory of
two whole requests, and prints each step as it happens. A page replays M1 beside M4.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from milestone_llm import MILESTONES
from milestone_llm.cli import Formatter, add_options, run_command, try_to_write

BEGINNING = "Answer in one short sentence.\n\n"
QUESTIONS = (
    "Who wrote Hamlet?",
    "Why is the sky blue?",
    "Where do penguins live?",
    "Name three fruits.",
)
MAX_TOKENS = 40
NUM_ROWS = 2
"""Whole requests for which there is memory."""
LEGEND = (
    "A line is a step, a column a request: its words are read downwards. ▸42 is a prompt of 42 "
    "tokens, ▸12+32 one of which 32 were in the cache, ░ padding, ■ the end."
)
IDEAS = (
    "Memory for two whole requests: two rows. They stay until both are done; what is computed for "
    "a row that is done is padding.",
    "Who runs is decided anew at every step: a row that is done makes room at once.",
    "The same memory in blocks of 16 tokens, given when they are needed: more requests fit in. "
    "When none is free, the last to come is preempted, and computed again later.",
    "All four prompts begin alike. That beginning is computed once, and its blocks are shared.",
    "The same steps with a decoder and kernels of its own. The next step is launched before the "
    "tokens of this one are known to the host.",
)
"""What each milestone adds."""
NAMES = ("static batching", "continuous batching", "paged KV memory", "prefix caching", "kernels")


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.lab.demo", description=__doc__, formatter_class=Formatter
    )
    add_options(parser, "model", "threads", "out")
    return parser


def before(args: argparse.Namespace) -> None:
    """Say what comes, since torch takes seconds to be imported."""
    from milestone_llm.consoles import console

    args.page = args.out / "demo.html"
    try_to_write(args.page)
    console.print("M1 to M5 answer the same four questions, in about a minute. Loading the model.")


def demo(args: argparse.Namespace) -> None:
    """Let the model speak, then serve the questions with each milestone in turn."""
    from milestone_llm.consoles import console
    from milestone_llm.lab.answer import print_answer

    from . import show
    from .step_lines import StepLines
    from .work import load_work

    args.prompts, args.max_tokens, args.temperature, args.seed = None, MAX_TOKENS, 0.0, 0
    args.max_num_seqs, args.scheduler, args.seconds = 2, None, 0
    work = load_work(args, [BEGINNING + question for question in QUESTIONS])
    args.max_model_len = work.longest
    if work.is_chat:
        engine = importlib.import_module(MILESTONES[0]).LLMEngine(
            work.loaded.model, tokenizer=work.loaded.tokenizer
        )
        console.print(f"\n[bold]you>[/] {' '.join(work.items[1].prompt.split())}")
        output = print_answer(engine, work.items[1].prompt, work.items[1].params)
        if output is None or not output.finished:
            raise KeyboardInterrupt
    runs = []
    console.print(f"\nThe four together. {LEGEND}")
    for index, (name, title, idea) in enumerate(zip(MILESTONES, NAMES, IDEAS, strict=True)):
        show.headline(f"M{index + 1}: {title}")
        console.print(idea + "\n")
        changes = {"max_num_seqs": NUM_ROWS if index < 2 else len(QUESTIONS)}
        if index >= 2:
            changes["kv_cache_tokens"] = NUM_ROWS * work.longest // 16 * 16
        engine = work.engine(importlib.import_module(name), **changes)
        engine.warm_up()
        engine.tracer.sinks.append(StepLines(engine.tokenizer))
        runs.append(work.serve(f"M{index + 1}", engine))
    show.answers(runs[-1], QUESTIONS)
    show.ladder(runs)
    show.page([runs[0], runs[3]], args.page)
    console.print("Open it in a browser, and press g: it asks you what the next step will be.")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_command(demo, parser().parse_args(arguments), before)


if __name__ == "__main__":
    sys.exit(main())
