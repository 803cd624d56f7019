"""Draw the KV memory of a trace: `python -m m3_paged.tools.kvmap trace.jsonl -o kvmap.png`

Each block at each step in the colour of the request that holds it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from milestone_llm.lab.cli import ended_in_one_line


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m m3_paged.tools.kvmap", description=__doc__)
    parser.add_argument("trace", metavar="trace.jsonl", help="written by trace=PATH")
    parser.add_argument("-o", "--output", default="kvmap.png", help=".png or .svg")
    parser.add_argument("--title", default="", help="default: the milestone")
    options = parser.parse_args(arguments)

    def draw() -> None:
        from milestone_llm.lab.plots.kvmap import draw_kvmap  # matplotlib takes a second
        from milestone_llm.lab.trace.jsonl import read_run

        print(f"wrote {draw_kvmap(read_run(options.trace), options.output, options.title)}")

    return ended_in_one_line(draw)


if __name__ == "__main__":
    sys.exit(main())
