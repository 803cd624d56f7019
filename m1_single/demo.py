"""Three requests in one static batch: `python -m m1_single.demo`

Watch the rows that read `padding`: the short request is long done, and its row is still computed
until the longest has its hundred tokens.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import m1_single
from milestone_llm.lab.demo.command import demo_parser, run_demo

PICTURE = "m1_timeline.png"


def demo(args: argparse.Namespace) -> None:
    """Serve the requests; show the steps in which something happened, text, summary, timeline."""
    from milestone_llm.lab.demo import show
    from milestone_llm.lab.demo.work import load_work

    work = load_work(args)
    runs = work.beside_own("static", m1_single)
    runs.append(work.run("yours" if runs else "Static batching", m1_single))
    show.steps(runs[-1])
    show.answers(runs[-1])
    show.requests(runs)
    show.summary(runs)
    show.timeline(runs, args.out / PICTURE)
    show.page(runs, args.explore)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    args = demo_parser("m1_single", __doc__).parse_args(arguments)
    return run_demo(demo, args, [PICTURE], seconds=16)


if __name__ == "__main__":
    sys.exit(main())
