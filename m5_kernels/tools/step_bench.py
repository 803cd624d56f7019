"""`python -m m5_kernels.step_bench`: how fast a decode step can be, with no engine around it.

One CUDA graph holds a whole step - metadata, layers, LM head, sampling, append - of a model of
Qwen3-0.6B's shape with random weights, so each replay decodes one more token for every row. The
table compares it with the time that reading the weights and the KV once would take: what
scheduling, transfers and Python add in the engine comes on top of this.
"""

from __future__ import annotations

import argparse
import sys

from milestone_llm.cli import Formatter

from .gpu_command import gpu_command


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m m5_kernels.step_bench", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add("--batches", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256], help="rows of a step")
    add("--context-len", type=int, default=600, help="tokens of each row")
    add("--profile", action="store_true", help="kernels of the smallest and the largest step")

    def run(args: argparse.Namespace) -> None:
        from .decode_steps import measure_steps

        measure_steps(args)

    return gpu_command(parser, run)


if __name__ == "__main__":
    sys.exit(main())
