"""`python -m m5_kernels.tune`: times every candidate tile on this GPU and prints the table's rows.

Candidates are compiled first, in parallel processes (compiling is what takes the time), then each
is checked against the torch twin and timed alone. A row is chosen by the geometric mean of its
speed over the shapes. `--details` prints every time measured.
"""

from __future__ import annotations

import argparse
import sys

from milestone_llm.cli import Formatter

from .gpu_command import gpu_command


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m m5_kernels.tune", description=__doc__, formatter_class=Formatter
    )
    parser.add_argument("--kernel", choices=["decode", "prefill", "linear", "all"], default="all")
    parser.add_argument("--head-dims", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--details", action="store_true", help="print every time measured")

    def run(args: argparse.Namespace) -> None:
        from .tile_search import search

        search(args)

    return gpu_command(parser, run)


if __name__ == "__main__":
    sys.exit(main())
