"""Draw the timeline of traces: `python -m m1_single.timeline trace.jsonl -o timeline.png`

Several traces, say of M1 and M2 at the same work, stand side by side on shared axes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from milestone_llm.lab.plots.command import picture_command


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m m1_single.timeline", description=__doc__)
    parser.add_argument("traces", nargs="+", metavar="trace.jsonl", help="written by trace=PATH")
    parser.add_argument("-o", "--output", default="timeline.png", help=".png or .svg")
    parser.add_argument("--labels", help="titles, separated by commas (default: the milestones)")
    parser.add_argument("--by", choices=("step", "time"), default="step", help="what x counts")

    def draw(options: argparse.Namespace) -> Path:
        from milestone_llm.lab.plots.timeline import draw_timeline
        from milestone_llm.lab.plots.timeline_spans import check_one_run
        from milestone_llm.lab.trace.jsonl import read_jsonl

        traces = [read_jsonl(path) for path in options.traces]
        for records in traces:
            check_one_run(records)
        labels = [records[0]["milestone"] for records in traces]
        labels = labels if options.labels is None else options.labels.split(",")
        return draw_timeline(traces, labels, options.output, by=options.by)

    picture_command(parser, arguments, draw)


if __name__ == "__main__":
    main()
