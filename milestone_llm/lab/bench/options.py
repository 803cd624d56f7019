"""The options of all benches. A milestone adds to them what its scenarios need."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from milestone_llm.cli import Formatter, add_options, positive

HF_BASELINES = ("one-by-one", "static", "continuous")


def bench_parser(
    milestone: str, description: str | None, scenarios: dict[str, str], baselines: Iterable[str]
) -> argparse.ArgumentParser:
    """The parser.

    Args:
        scenarios: what `--scenario` can name, and what each is.
        baselines: what `--baseline` can name beside Hugging Face.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {milestone}.bench", description=description, formatter_class=Formatter
    )
    add = parser.add_argument
    about = " ".join(f"{name}: {what}" for name, what in scenarios.items())
    add("--scenario", choices=list(scenarios), default="workload", help=about)
    add("--workload", choices=["mixed", "nano"], default="mixed", help="kind of requests")
    add("--num-requests", type=positive, metavar="N", help="instead of the workload's own number")
    for name, what in (("input", "a prompt"), ("output", "an output")):
        add(
            f"--{name}-len",
            type=positive,
            nargs=2,
            metavar=("MIN", "MAX"),
            help=f"tokens of {what}, uniformly drawn, instead of the workload's own range",
        )
    add(
        "--baseline",
        nargs="+",
        choices=["hf", *HF_BASELINES, *baselines],
        default=[],
        help="compare with others doing the same work; hf: with all that Hugging Face has",
    )
    add("--rounds", type=positive, default=1, help="repeat, and report the median and the spread")
    limits = ("max-num-seqs", "max-num-batched-tokens", "max-model-len")
    add_options(parser, "model", *limits, "set", "seed", "threads", "explore", "json")
    parser.set_defaults(max_num_seqs=None, max_num_batched_tokens=2048)
    add("--dtype", help="float32, bfloat16, float16 (default: float32 on a CPU, else bfloat16)")
    add("--device", help="cpu, cuda, cuda:1... (default: CUDA where there is one)")
    add("--markdown", type=Path, metavar="PATH", help="write the tables there")
    return parser
