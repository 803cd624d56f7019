"""What do caching and chunking buy, and where do they lose? `python -m m4_prefix_chunked.bench`

Without --scenario this is the bench that every milestone has; --baseline m3 compares with M3.

  --scenario prefix   eight requests with one system prompt, caching on and off; and requests with
                      nothing in common, to see what looking into the cache costs, beside M3
  --scenario stall    a long prompt comes while others decode, under both prefill policies

Contestants take turns in every round, and at every step where their steps are the same. Ratios are
those of rounds, and their median counts.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from milestone_llm.lab.bench.command import Bench, bench_command
from milestone_llm.cli import positive


def prefix(bench: Bench) -> None:
    """Prefix caching on and off."""
    from m4_prefix_chunked.tools import bench_scenarios as scenarios

    scenarios.shared_prompt(bench)
    scenarios.nothing_shared(bench)


def stall(bench: Bench) -> None:
    """A long prompt comes while others decode."""
    from m4_prefix_chunked.tools import bench_scenarios as scenarios

    scenarios.long_arrival(bench)


def m3(engine: Any) -> Any:
    """M3, beside the engine that is measured."""
    from m4_prefix_chunked.tools import bench_scenarios as scenarios

    return scenarios.m3_contestant(engine)


def options(parser: argparse.ArgumentParser) -> None:
    """What the scenarios need."""
    parser.set_defaults(rounds=3)
    add = parser.add_argument_group("scenarios").add_argument
    add("--system-prompt-tokens", type=positive, default=512, help="what prompts have in common")
    add("--long-prompt-tokens", type=positive, default=1500, help="of the one that comes later")
    add("--chunk-tokens", type=positive, default=256, help="budget of a step that cuts it")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return bench_command(
        "m4_prefix_chunked",
        __doc__,
        arguments,
        scenarios={"prefix": prefix, "stall": stall},
        options=options,
        baselines={"m3": m3},
    )


if __name__ == "__main__":
    sys.exit(main())
