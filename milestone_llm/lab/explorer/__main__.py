"""A page that replays a run: `python -m milestone_llm.lab.explorer run.jsonl -o run.html`

The page is one file that works from disk, without a network. It has a timeline with a cursor, and
at the cursor the batch, the token budget, the queues with why a request waits, and the owners of
every KV block. It also asks what the next step will be. Two traces are shown next to each other
with one clock:

  python -m milestone_llm.lab.explorer m1.jsonl m2.jsonl -o both.html

An older page is made again from the runs that it has: `... old.html -o new.html`.

An output that ends in `.json` is a trace for https://ui.perfetto.dev instead of a page.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from milestone_llm.cli import Formatter, ended_in_one_line, positive, try_to_write
from milestone_llm.core.errors import InputError


def explore(args: argparse.Namespace) -> None:
    """Read traces and write the page.

    Raises:
        InputError: a trace, a label or the path is not valid.
    """
    from milestone_llm.consoles import console
    from milestone_llm.trace.jsonl import read_runs

    from .page import MAX_TRACES, Run, in_the_page_of_today, write_page
    from .perfetto import perfetto_trace

    if len(args.traces) > MAX_TRACES:
        raise InputError(f"at most {MAX_TRACES} traces stand side by side, got {len(args.traces)}")
    try_to_write(args.output)
    is_trace = args.output.suffix == ".json"
    if not is_trace and [Path(trace).suffix for trace in args.traces] == [".html"]:
        page = in_the_page_of_today(Path(args.traces[0]))
        args.output.write_text(page, encoding="utf-8")
    else:
        traces, budget = read_runs(args.traces, args.labels), args.max_num_batched_tokens
        runs = [Run(label, records, budget) for label, records in traces]
        if is_trace:
            args.output.write_text(json.dumps(perfetto_trace(runs)), encoding="utf-8")
        else:
            write_page(runs, args.output)
    console.print(f"wrote {args.output}", markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.lab.explorer",
        description=__doc__,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("traces", nargs="+", metavar="run.jsonl", help="written by trace=PATH; .jsonl or .jsonl.gz")
    add(
        "-o",
        "--output",
        type=Path,
        default=Path("run.html"),
        metavar="PATH",
        help="the page, or a .json",
    )
    add("--labels", metavar="A[,B]", help="titles (default: the milestones)")
    meaning = "the step's budget of tokens, where the trace does not give it away"
    add("--max-num-batched-tokens", type=positive, metavar="N", help=meaning)
    args = parser.parse_args(arguments)
    return ended_in_one_line(lambda: explore(args))


if __name__ == "__main__":
    sys.exit(main())
