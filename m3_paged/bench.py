"""What do blocks buy? `python -m m3_paged.bench`

The same requests on the same KV memory, in slots (m2_batching) of max_model_len tokens and of the
longest request, and in blocks (m3_paged): how many run at a time, how fast they are served, and how
much memory lies idle.

  --equal-concurrency          memory for all, so that both run the same requests at a time: what
                               reading KV through block tables costs
  --input-len 512 512 --output-len 1 512
                               requests of 512..1024 tokens: how little a block wastes then
  --scenario workload          the bench that every milestone has
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from milestone_llm.lab.bench.command import Bench, bench_command
from milestone_llm.cli import add_options, positive


def layouts(bench: Bench) -> None:
    """The same requests on the same KV memory, in slots and in blocks."""
    from m3_paged.tools.bench_layouts import compare_layouts

    compare_layouts(bench)


def options(parser: argparse.ArgumentParser) -> None:
    """What the comparison of layouts needs."""
    add_options(parser, "block-size", "preemption")
    parser.set_defaults(scenario="layouts", num_requests=32, max_model_len=1024, rounds=3)
    add = parser.add_argument_group("layouts").add_argument
    add("--layout", choices=("slot", "block", "both"), default="both", help="who is measured")
    about = (
        "tokens of a slot, one engine each (default: max_model_len, and the longest request, which "
        "nobody knows beforehand)"
    )
    add("--slot-len", type=positive, nargs="+", metavar="N", help=about)
    about = "KV memory of either layout (default: 4 slots, 4 * max_model_len)"
    add("--kv-cache-tokens", type=positive, metavar="N", help=about)
    add("--equal-concurrency", action="store_true", help="memory and rows for all, in both layouts")
    hidden: dict[str, Any] = {"type": positive, "help": argparse.SUPPRESS}
    hidden["default"] = argparse.SUPPRESS
    add("--num-prompts", dest="num_requests", **hidden)  # names that these options once had
    for index, end in enumerate(("min", "max")):
        for name in ("input", "output"):
            add(f"--{end}-{name}-len", dest=f"{name}_len", action=OneEnd, const=index, **hidden)


class OneEnd(argparse.Action):
    """One end of a range of lengths."""

    def __call__(self, parser, args, value, option_string=None):
        """Set it; the other end stays, at first the one of the workload `mixed`."""
        ends = list(getattr(args, self.dest) or (16, 128))
        ends[self.const] = value
        setattr(args, self.dest, ends)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    scenarios = {"layouts": layouts}
    return bench_command("m3_paged", __doc__, arguments, scenarios=scenarios, options=options)


if __name__ == "__main__":
    sys.exit(main())
