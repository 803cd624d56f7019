"""Three requests for two rows, batched anew at every step: `python -m m2_batching.demo`

r2 waits, and joins r1 in the step after r0 has finished; static batching (M1) serves the same
requests beside it, and r2 waits there for the whole batch. To see more:

  --max-num-seqs 8                         a row for each: the batch falls from 3 rows to 2 to 1
  --arrivals 0,0,12                        one comes when the others are under way
  --rate 2                                 they come at random, 2 a second on average
  --max-num-seqs 1 --policy priority --priorities 2,0,1
                                           the most urgent first
  --max-num-batched-tokens 64,2048         a small step budget against a large one
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import m1_single
import m2_batching
from m2_batching.tools.arrivals import add_arrival_options, arriving
from milestone_llm.cli import add_options
from milestone_llm.lab.demo.command import demo_parser, numbers, run_demo

PICTURE = "m2_timeline.png"


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = demo_parser("m2_batching", __doc__)
    add = parser.add_argument
    add_arrival_options(parser)
    about = "tokens of a step (default: 2048, or a longer prompt's); several are compared"
    add("--max-num-batched-tokens", type=numbers(1), metavar="N[,N...]", help=about)
    add_options(parser, "max-model-len", max_num_seqs=2)
    add("--no-static", action="store_true", help="leave static batching out")
    return parser


def demo(args: argparse.Namespace) -> None:
    """Serve the requests with each engine; show steps, text, comparison and timelines."""
    from milestone_llm.consoles import console
    from milestone_llm.lab.demo import show
    from milestone_llm.lab.demo.work import load_work

    work = load_work(args)
    work.items = arriving(work.items, args)
    runs = []
    if not (args.no_static or args.scheduler):
        runs.append(work.run("static", m1_single, max_num_batched_tokens=None, trace=None))
    budgets = list(dict.fromkeys(args.max_num_batched_tokens or [None]))
    args.max_model_len = args.max_model_len or work.longest  # a region need not hold more
    runs += work.beside_own("continuous", m2_batching, max_num_batched_tokens=budgets[0])
    for budget in budgets:
        label = "continuous" if len(budgets) == 1 else f"budget {budget}"
        label = "yours" if args.scheduler and budget == budgets[0] else label
        runs.append(work.run(label, m2_batching, max_num_batched_tokens=budget))
        if budget == budgets[0]:
            show.steps(runs[-1])
            show.answers(runs[-1])
            args.trace = None  # the others would overwrite it
    show.requests(runs)
    show.summary(runs)
    if args.policy == "priority" and args.max_num_seqs >= len(work.items):
        console.print("All fit into one step, whatever their priorities: try --max-num-seqs 1.")
    if args.policy == "fcfs" and args.priorities:
        console.print("--priorities changes nothing without --policy priority.")
    show.timeline(runs, args.out / PICTURE)
    show.page(runs, args.explore)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_demo(demo, parser().parse_args(arguments), [PICTURE], seconds=25)


if __name__ == "__main__":
    sys.exit(main())
