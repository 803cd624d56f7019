"""How many steps M4 and vLLM plan alike: python -m docs.questions.m4_vllm --runs 1000

Needs vLLM's Python files: `python -m m4_prefix_chunked.tools.vllm.fetch 0.33.0`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from m4_prefix_chunked.tools.vllm.compare import KINDS, count
from m4_prefix_chunked.tools.vllm.fetch import make_importable
from m4_prefix_chunked.tools.vllm.rules import rules_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100, help="random runs of each line")
    parser.add_argument("--vllm", type=Path, help="folder with vllm/ in it")
    args = parser.parse_args()
    make_importable(args.vllm)
    from m4_prefix_chunked.tools.vllm.run_vllm import VERSION

    print(f"vLLM {VERSION}, {args.runs:,} random runs a line; steps up to the first that differs")
    print(f"{'':28} {'runs the same':>15}  {'steps the same':>28}")
    for name, rules in (("M4 as it is", None), ("by rules, to the block", rules_of(VERSION))):
        for kind in KINDS:
            tally = count(kind, rules, range(args.runs))
            runs = f"{tally.num_same_runs:,} of {tally.num_runs:,}"
            steps = f"{tally.num_same_steps:,} of {tally.num_steps:,} ({tally.share})"
            print(
                f"{name if kind == 'text' else '':22}  {kind:12} {runs:>15}  {steps:>28}",
                flush=True,
            )


if __name__ == "__main__":
    main()
