"""How fast is the engine with its own kernels? `python -m m5_kernels.bench`

On a GPU: the `nano` workload on a model of Qwen3-0.6B's shape, with random weights unless --model
names others. On a CPU: `mixed` on SmolLM2-135M with the kernels' torch twins, as the benches of
the other milestones. Before anything is timed, tokens are compared with M4's on the same device.

  --single                             one request: 100 tokens in, 512 out
  --engines m1 m2 m3 m4 m5             all milestones on the same work
  --without graphs pipelining          what each of them gains; a+b: both off together
  --profile                            where a step's time goes
  --tensor-parallel-size 2             two GPUs compared with one; the cost of all-reduces

To measure single kernels: `python -m m5_kernels.tools.kernel_bench`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from milestone_llm.cli import positive
from milestone_llm.lab.bench.command import bench_command

from .tools.launch import SIZE_HELP, silence, start_ranks

if TYPE_CHECKING:
    from milestone_llm.lab.bench.compare import Bench


def engines(bench: Bench) -> None:
    """Measure M5, and what --engines, --without and --baseline name, on one workload."""
    from m5_kernels.tools.bench_engines import compare_engines

    compare_engines(bench)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options that only M5 has, and defaults that depend on the device."""
    parser.set_defaults(model=None, workload=None, max_num_batched_tokens=None)
    add = parser.add_argument_group("engines").add_argument
    add("--single", action="store_true", help="one request, 100 tokens in and 512 out")
    milestones = ["m1", "m2", "m3", "m4", "m5"]
    add("--engines", nargs="+", choices=milestones, default=["m5"], help="whom to measure")
    add(
        "--without",
        nargs="+",
        metavar="PART",
        default=[],
        help="measure M5 once more without graphs, pipelining, prefix-cache, chunks, add-norm, "
        "rope-kv, silu-mul, skinny-linear, pdl, hopper, fused (Hugging Face's modules instead), "
        "eight-bits (of --set quantization=int8), guesses (of --set speculation=ngram), "
        "tensor-parallel, invariance, invariant-linear, invariant-attention (of --set "
        "batch_invariant=true)",
    )
    add("--profile", action="store_true", help="print where the time of a step goes")
    add("--no-check", action="store_true", help="do not compare tokens with M4's first")
    add("--tensor-parallel-size", type=positive, default=1, metavar="N", help=SIZE_HELP)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status."""

    def on_every_rank(args: argparse.Namespace) -> None:
        start_ranks("m5_kernels.bench", args.tensor_parallel_size, arguments)
        silence(args)

    return bench_command(
        "m5_kernels",
        __doc__,
        arguments,
        run=engines,
        options=options,
        before=on_every_rank,
    )


if __name__ == "__main__":
    sys.exit(main())
