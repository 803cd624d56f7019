"""`python -m m5_kernels.kernel_bench`: each kernel against the limit of the GPU.

Kernels that move bytes are rated in GB/s, each input and output counted once, against the
fastest read and copy measured in the same run; prefill in TFLOP/s of causal attention against a
large matrix product. Every kernel is first compared with its torch twin on the very inputs that are
timed; inputs rotate, so that no launch finds its own in the L2 cache.
"""

from __future__ import annotations

import argparse
import sys

from milestone_llm.cli import Formatter

from .gpu_command import gpu_command


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m m5_kernels.kernel_bench", description=__doc__, formatter_class=Formatter
    )
    kernels = ["decode", "split", "prefill", "elementwise", "metadata", "sample", "all"]
    parser.add_argument("--kernel", choices=kernels, default="all")

    def run(args: argparse.Namespace) -> None:
        from .kernel_tables import measure_kernels

        measure_kernels(args.kernel)

    return gpu_command(parser, run)


if __name__ == "__main__":
    sys.exit(main())
