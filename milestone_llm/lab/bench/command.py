"""One command line for all benches: `python -m m1_single.bench --baseline hf`

A program that makes a comparison of its own passes a function that takes a `Bench`. Nothing here
imports torch.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from milestone_llm import MILESTONES
from milestone_llm.cli import Formatter, add_options, positive, run_command, say_that_it_loads

if TYPE_CHECKING:
    from .compare import Bench

HF_BASELINES = ("one-by-one", "static", "continuous")


def bench_command(
    milestone: str,
    description: str | None,
    arguments: Sequence[str] | None = None,
    *,
    run: Callable[[Bench], None] | None = None,
    prog: str | None = None,
    options: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
    before: Callable[[argparse.Namespace], object] = lambda args: None,
) -> int:
    """Run the bench of a milestone.

    Args:
        milestone: the package whose `LLMEngine` is measured.
        description: first paragraph of `--help`.
        arguments: replace those of the command line.
        run: makes the comparison; None: compares the engine with `--baseline`.
        prog: the program's name, if it is not the milestone's own bench.
        options: adds the options of `run`, and changes defaults.
        before: does checks that need no torch, before torch is imported.

    Returns:
        The exit status.
    """
    prog = prog or f"{milestone}.bench"
    parser = bench_parser(milestone, prog, description)
    options(parser)
    words = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(words)

    def body(args: argparse.Namespace) -> None:
        from .compare import Bench
        from .record import made_by

        bench = Bench(milestone, args, made_by(["python", "-m", prog, *words]))
        try:
            (run or run_workload)(bench)
        finally:  # also after an error: keep what was measured
            bench.write()

    def check(args: argparse.Namespace) -> None:
        before(args)
        say_that_it_loads(args)

    return run_command(body, args, check)


def run_workload(bench: Bench) -> None:
    """Measure the engine and the baselines on the requests of `--workload`."""
    items = bench.make_work()
    engine = bench.engine(items)
    contestants = {engine.milestone: engine, **bench.baselines(engine, items)}
    bench.compare(bench.args.workload, items, contestants)


def bench_parser(milestone: str, prog: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of all benches."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {prog}", description=description, formatter_class=Formatter
    )
    add = parser.add_argument
    add("--workload", choices=["mixed", "nano"], default="mixed", help="kind of requests")
    add("--num-requests", type=positive, metavar="N", help="instead of the workload's own number")
    add_options(parser, "input-len", "output-len")
    about = "compare with others doing the same work; hf: with all that Hugging Face has"
    earlier = [name[:2] for name in MILESTONES[: MILESTONES.index(milestone)]]
    choices = ["hf", *HF_BASELINES, *earlier]
    add("--baseline", nargs="+", choices=choices, default=[], help=about)
    add("--rounds", type=positive, default=1, help="repeat, and report the median and the spread")
    limits = ("max-num-seqs", "max-num-batched-tokens", "max-model-len")
    add_options(parser, "model", *limits, "set", "seed", "threads", "json", "markdown")
    parser.set_defaults(max_num_seqs=None, max_num_batched_tokens=2048)
    add("--dtype", help="float32, bfloat16, float16 (default: float32 on a CPU, else bfloat16)")
    add("--device", help="cpu, cuda, cuda:1... (default: CUDA where there is one)")
    return parser
