"""Six requests and memory for half of them: `python -m m3_paged.demo`

They are all admitted, for at first they need few blocks. Then they grow, the pool runs full, and
the last to come is preempted; it is resumed when others have finished. Maps show whose each block
is at the telling steps. To see more:

  --preemption swap            blocks move to host memory and back instead of being recomputed
  --n 3                        three completions a prompt: its blocks are shared until written into
  --block-size 1 or 64         no waste, or much
  --kv-cache-tokens 2048       room for all: nobody is preempted
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle
from pathlib import Path

from rich.table import Table
from rich.text import Text

from milestone_llm.bench.command import positive
from milestone_llm.bench.workloads import WorkItem
from milestone_llm.cli import console, run_command
from milestone_llm.demo import kit as demo_kit
from milestone_llm.demo.kit import DemoRun
from milestone_llm.engine.inputs import encode_prompt
from milestone_llm.models.checkpoint import load_model, max_position
from milestone_llm.plots.block_history import block_history
from milestone_llm.plots.block_map import print_block_map
from milestone_llm.plots.kvmap import draw_kvmap
from milestone_llm.plots.timeline_spans import arrival_order
from milestone_llm.trace.console import ConsoleSink
from milestone_llm.trace.kv_figures import KVFigures
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.text import plural

from .engine import LLMEngine

PROMPTS = (
    "Name three fruits.",
    "Why is the sky blue?",
    "Write two sentences about the sea in winter.",
    "What is the capital of France?",
    "Explain to a child what a computer does.",
    "How do I bake pancakes?",
)
LENGTHS = (40, 96, 64, 32, 80, 56)
"""Output tokens of each at most."""


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = demo_kit.base_parser("m3_paged", __doc__)
    add = parser.add_argument
    add("--n", type=positive, default=1, metavar="N", help="completions of each prompt")
    add("--block-size", type=positive, default=16, metavar="N", help="tokens of a KV block")
    add(
        "--kv-cache-tokens",
        type=positive,
        metavar="N",
        help="KV memory (default: about half of what all requests need at their longest)",
    )
    add(
        "--preemption",
        choices=("recompute", "swap"),
        default="recompute",
        help="what becomes of the KV of a preempted request",
    )
    parser.set_defaults(temperature=None)  # greedy, but completions of one prompt must differ
    return parser


def demo(args: argparse.Namespace) -> None:
    """Serve the requests; show telling steps with block maps, text, summary and pictures."""
    loaded = load_model(args.model)
    items = work_items(args, loaded.tokenizer, loaded.model.config.get_text_config().vocab_size)
    is_chat = demo_kit.is_chat_model(loaded.tokenizer)
    lengths = [len(encode_prompt(loaded.tokenizer, item.prompt, is_chat)) for item in items]
    longest = max(n + item.params.max_tokens for n, item in zip(lengths, items, strict=True))
    longest = min(longest, max_position(loaded.model) or longest)
    engine = LLMEngine(
        loaded.model,
        tokenizer=loaded.tokenizer,
        max_num_seqs=args.max_num_seqs,
        max_model_len=longest,
        block_size=args.block_size,
        kv_cache_tokens=args.kv_cache_tokens or small_pool(args, items, lengths, longest),
        preemption=args.preemption,
        trace=args.trace,
    )
    run = demo_kit.serve_with_progress(engine, items, is_chat, "paged")
    print_moments(run, engine)
    demo_kit.print_answers(items, run.outputs)
    print_completions(run)
    demo_kit.print_requests([run])
    demo_kit.print_summary([run])
    print_memory(run, engine)
    demo_kit.write_timeline([run], args.out / "m3_timeline.png")
    write_kvmap(run, args.out / "m3_kvmap.png")


def work_items(
    args: argparse.Namespace, tokenizer: object | None, vocab_size: int
) -> list[WorkItem]:
    """The requests that the options describe."""
    args.prompts = args.prompts or list(PROMPTS[:3] if args.n > 1 else PROMPTS)
    if args.temperature is None:
        args.temperature = 0.8 if args.n > 1 else 0.0
    items = demo_kit.work_items(args, tokenizer, vocab_size)
    lengths = cycle(LENGTHS if args.max_tokens is None else [args.max_tokens])
    return [
        replace(
            item,
            params=replace(item.params, n=args.n, max_tokens=next(lengths), ignore_eos=False),
        )
        for item in items
    ]


def small_pool(
    args: argparse.Namespace, items: Sequence[WorkItem], lengths: Sequence[int], longest: int
) -> int:
    """Tokens of a pool that holds one request at its longest, or half of what they would need
    that may run at a time.
    """
    needs = sorted(
        length + item.params.n * item.params.max_tokens
        for length, item in zip(lengths, items, strict=True)
    )
    num_prompts = max(1, args.max_num_seqs // args.n)
    num_blocks = -(-max(longest, sum(needs[-num_prompts:]) // 2) // args.block_size)
    return int(num_blocks * args.block_size)


def telling_moments(records: Sequence[StepRecord]) -> dict[int, str]:
    """Index of each record that is worth a map, and what to look at there; at most six."""
    moments: dict[int, str] = {0: "The first step"}

    def first(what: str, indices: Sequence[int]) -> None:
        if indices:
            moments.setdefault(indices[0], what)

    everyone = range(len(records))
    copies = [i for i in everyone if any(e.type == "copy_on_write" for e in records[i].events)]
    first("Copy-on-write: a sharer writes into a shared block and gets its own", copies)
    preempted = [i for i in everyone if records[i].preempted]
    first("The pool is as good as full", [i - 1 for i in preempted])
    first("A preemption: a block is needed and none is free", preempted)
    resumed = [i for i in everyone if records[i].resumed]
    first("A resumption: the preempted request is back", resumed)
    if not preempted:
        fullest = max(everyone, key=lambda i: records[i].kv.used)
        first("The pool at its fullest", [fullest])
    return dict(sorted(moments.items()))


def print_moments(run: DemoRun, engine: LLMEngine) -> None:
    """The telling steps: what was computed, and whose each block was meanwhile."""
    records = [record.to_dict() for record in run.records]
    states, order = block_history(records), arrival_order(records)
    sink = ConsoleSink(console)
    for index, what in telling_moments(run.records).items():
        headline(f"{what} (step {run.records[index].step})")
        if not demo_kit.prints_steps(engine):
            sink(run.records[index])
        print_block_map(states[index], order, console)


def print_completions(run: DemoRun) -> None:
    """The second and further completions of each prompt."""
    if all(len(output.outputs) == 1 for output in run.outputs):
        return
    headline("Further completions")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for output in run.outputs:
        for completion in output.outputs[1:]:
            text = completion.text.strip() or " ".join(map(str, completion.token_ids))
            grid.add_row(Text(f"{output.request_id}/{completion.index}"), Text(text))
    console.print(grid)


def print_memory(run: DemoRun, engine: LLMEngine) -> None:
    """What the pool went through, and what slots would have made of the same memory."""
    figures, size = KVFigures.of(run.records), engine.config.block_size
    num_tokens = figures.total * size
    num_slots = num_tokens // engine.max_model_len
    headline("KV memory")
    lines = {
        "pool": f"{plural(figures.total, 'block')} of {size}, {num_tokens:,} tokens",
        "requests at a time": f"{figures.max_concurrent}; in slots of "
        f"max_model_len={engine.max_model_len} tokens: {num_slots}",
        "watermark": f"{plural(engine.stats()['kv']['watermark'], 'block')}",
        "reserved, but empty": f"{figures.waste_share:.1%} of the places, "
        f"{figures.waste_per_request:.1f} a request on average",
        "preemptions": f"{figures.num_preemptions}, {figures.num_resumptions} resumed: "
        f"{plural(figures.num_recomputed_tokens, 'token')} recomputed, "
        f"{plural(figures.num_swapped_blocks, 'block')} swapped out",
        "copies on write": f"{plural(figures.num_copies, 'block')}",
    }
    table = Table(box=None, show_header=False)
    for name, text in lines.items():
        table.add_row(name, text)
    console.print(table)


def headline(text: str) -> None:
    """What the next lines are about."""
    console.print()
    console.rule(f"[bold]{text}", align="left", style="dim")


def write_kvmap(run: DemoRun, path: Path) -> None:
    """Draw who owned which block when, and say where the picture is."""
    draw_kvmap([record.to_dict() for record in run.records], path)
    console.print(f"kvmap: {path}", markup=False, soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_command(demo, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
