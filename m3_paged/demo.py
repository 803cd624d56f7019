"""Six requests and memory for half of them: `python -m m3_paged.demo`

They are all admitted, for at first they need few blocks. Then they grow, the pool runs full, and
the last to come is preempted; it is resumed when others have finished. Maps show whose each block
is at the steps that matter. To see more:

  --preemption swap            blocks move to host memory and back instead of being recomputed
  --n 3                        three completions a prompt: its blocks are shared until written into
  --block-size 1 or 64         no waste, or much
  --kv-cache-tokens 2048       room for all: no request is preempted
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import m3_paged
from milestone_llm.cli import add_options, positive
from milestone_llm.lab.demo.command import demo_parser, run_demo

if TYPE_CHECKING:
    from milestone_llm.lab.demo.work import DemoRun, Work

PROMPTS = (
    "Name three fruits.",
    "Why is the sky blue?",
    "Write two sentences about the sea in winter.",
    "What is the capital of France?",
    "Explain to a child what a computer does.",
    "How do I bake pancakes?",
)
LENGTHS = (40, 96, 64, 32, 80, 56)
"""Most output tokens of each request."""
PICTURES = "m3_timeline.png", "m3_kvmap.png"


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = demo_parser("m3_paged", __doc__)
    meaning = "completions of each prompt"
    parser.add_argument("--n", type=positive, default=1, metavar="N", help=meaning)
    add_options(parser, "block-size", "kv-cache-tokens", "preemption")
    parser.set_defaults(temperature=None)  # greedy, but completions of one prompt must differ
    return parser


def demo(args: argparse.Namespace) -> None:
    """Serve the requests; show steps with block maps, text, summary and pictures."""
    from milestone_llm.lab.demo import show
    from milestone_llm.lab.demo.work import load_work

    from .tools.demo_maps import print_maps, print_memory

    if args.temperature is None:
        args.temperature = 0.8 if args.n > 1 else 0.0
    prompts = PROMPTS[:3] if args.n > 1 else PROMPTS
    work = load_work(args, prompts, LENGTHS, n=args.n, ignore_eos=False)
    args.max_model_len = work.longest
    args.kv_cache_tokens = args.kv_cache_tokens or small_pool(args, work)
    ours = work.beside_own("paged", m3_paged)
    run = work.run("yours" if ours else "paged", m3_paged)
    print_maps(run)
    show.answers(run)
    show.requests([*ours, run])
    show.summary([*ours, run])
    print_memory(run)
    timeline, kvmap = (args.out / picture for picture in PICTURES)
    show.timeline([*ours, run], timeline)
    show.picture("kvmap", kvmap, lambda: draw_map(run, kvmap))
    show.page([*ours, run], args.explore)


def draw_map(run: DemoRun, path: Path) -> None:
    """Draw whose each block was at each step."""
    from milestone_llm.lab.plots.kvmap import draw_kvmap

    draw_kvmap(run.records, path)


def small_pool(args: argparse.Namespace, work: Work) -> int:
    """Return the tokens of a small pool: it holds one request at its longest, or half of what the
    requests that may run at a time would need, whichever is more.
    """
    needs = sorted(
        length + item.params.n * min(item.params.max_tokens, work.longest - length)
        for length, item in zip(work.prompt_lengths, work.items, strict=True)
    )
    num_prompts = max(1, args.max_num_seqs // args.n)
    num_blocks = -(-max(work.longest, sum(needs[-num_prompts:]) // 2) // args.block_size)
    return int(num_blocks * args.block_size)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_demo(demo, parser().parse_args(arguments), PICTURES, seconds=14)


if __name__ == "__main__":
    sys.exit(main())
