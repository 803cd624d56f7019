"""Draw what clients got at each rate, all servers on shared axes.

    python -m milestone_llm.lab.plots.sweep record.json -o sweep.png

The record is what `python -m milestone_llm.serving.bench --json` writes.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .command import picture_command


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m milestone_llm.lab.plots.sweep", description=__doc__
    )
    parser.add_argument("record", type=Path, metavar="record.json")
    parser.add_argument("-o", "--output", default="sweep.png", help=".png or .svg")

    def draw(options: argparse.Namespace) -> Path:
        from .sweep_figure import draw_sweep  # matplotlib takes a second

        data = json.loads(options.record.read_text(encoding="utf-8"))
        return draw_sweep(data, options.output)

    picture_command(parser, arguments, draw)


if __name__ == "__main__":
    main()
