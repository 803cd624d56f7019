"""Draw the KV memory of a trace: `python -m m3_paged.kvmap trace.jsonl -o kvmap.png`

Each block at each step in the colour of the request that holds it.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from milestone_llm.lab.plots.command import picture_command


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m m3_paged.kvmap", description=__doc__)
    parser.add_argument("trace", metavar="trace.jsonl", help="written by trace=PATH")
    parser.add_argument("-o", "--output", default="kvmap.png", help=".png or .svg")
    parser.add_argument("--title", default="", help="default: the milestone")

    def draw(options: argparse.Namespace) -> Path:
        from milestone_llm.lab.plots.kvmap import draw_kvmap
        from milestone_llm.lab.trace.jsonl import read_jsonl

        return draw_kvmap(read_jsonl(options.trace), options.output, options.title)

    picture_command(parser, arguments, draw)


if __name__ == "__main__":
    main()
