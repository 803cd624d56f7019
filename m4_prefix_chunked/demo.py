"""Prefix caching and chunked prefill, each on and off: `python -m m4_prefix_chunked.demo`

1. Eight visitors ask the same library desk, so that eight prompts begin with the same house rules.
   The first pays for them, the others find them in the cache, which is drawn as the tree it is.
2. A long prompt comes while four requests decode: with prefill_policy="mixed" it is computed in
   chunks beside them, with "prefill_first" they stand still meanwhile.
3. Only with --part 3: a request that repeats its prompt guesses its next tokens.

To see more:

  --spacing 0                      all eight come at once: still only one pays
  --block-size 64                  what is shared ends at a full block
  --part 2 --max-num-batched-tokens 2048
                                   a budget so large that the whole prompt is one chunk
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from milestone_llm.cli import add_options, positive, whole_number
from milestone_llm.lab.demo.command import demo_parser, run_demo

PICTURES = "m4_prefix.png", "m4_timeline.png", "m4_guesses.png"


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = demo_parser("m4_prefix_chunked", __doc__)
    add = parser.add_argument
    add("--part", type=int, choices=(1, 2, 3), help="only this one (default: 1 and 2)")
    add("--system-prompt", metavar="TEXT", help="what all prompts begin with (default: rules)")
    meaning = "steps from one request's arrival to the next one's, in part 1"
    add("--spacing", type=whole_number, default=4, metavar="STEPS", help=meaning)
    meaning = "of the prompt that comes later, in part 2 (default: 1,400; 400 for a tiny model)"
    add("--long-prompt-tokens", type=positive, metavar="N", help=meaning)
    meaning = "tokens of a step in part 2 (default: 256; 64 for a tiny model)"
    add("--max-num-batched-tokens", type=positive, metavar="N", help=meaning)
    add_options(parser, "block-size", max_tokens=24)
    return parser


def demo(args: argparse.Namespace) -> None:
    """Run the parts that were asked for."""
    from milestone_llm.models.checkpoint import load_model

    from . import LLMEngine
    from .tools.demo_chunks import long_arrival
    from .tools.demo_guesses import guesses
    from .tools.demo_prefix import shared_prefix

    loaded = load_model(args.model)
    # Without this, work that a process does only once would count as r0's.
    LLMEngine(loaded.model, max_model_len=128).warm_up()
    if args.part in (None, 1):
        shared_prefix(args, loaded, args.out / PICTURES[0])
    if args.part in (None, 2):
        long_arrival(args, loaded, args.out / PICTURES[1])
    if args.part == 3:
        guesses(args, loaded, args.out / PICTURES[2])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_demo(demo, parser().parse_args(arguments), PICTURES, seconds=50)


if __name__ == "__main__":
    sys.exit(main())
