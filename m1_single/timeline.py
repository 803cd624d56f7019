"""Draw the timeline of traces: `python -m m1_single.timeline trace.jsonl -o timeline.png`

Several traces, say of M1 and M2 at the same work, stand side by side on shared axes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from milestone_llm.cli import ended_in_one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m m1_single.timeline", description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="trace.jsonl", help="written by trace=PATH")
    parser.add_argument("-o", "--output", default="timeline.png", help=".png or .svg")
    parser.add_argument("--labels", help="titles, separated by commas (default: the milestones)")
    parser.add_argument(
        "--by", choices=("step", "positions", "time"), default="step", help="what x counts"
    )
    options = parser.parse_args(arguments)

    def draw() -> None:
        from milestone_llm.consoles import console
        from milestone_llm.lab.plots.timeline import draw_timeline  # matplotlib takes a second
        from milestone_llm.trace.jsonl import read_runs

        labels, traces = zip(*read_runs(options.traces, options.labels), strict=True)
        path = draw_timeline(traces, labels, options.output, by=options.by)
        console.print(f"wrote {path}", markup=False, soft_wrap=True)

    return ended_in_one_line(draw)


if __name__ == "__main__":
    sys.exit(main())
