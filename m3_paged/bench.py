"""What do blocks buy? `python -m m3_paged.bench`

The same requests on the same KV memory, in slots of max_model_len tokens (m2_batching) and in
blocks (m3_paged): how many run at a time, how fast they are served, and how much memory lies idle.

  --equal-concurrency          memory for all, so that both run the same requests at a time: what
                               reading KV through block tables costs
  --min-input-len 512 --max-input-len 512 --min-output-len 1 --max-output-len 512
                               requests of 512..1024 tokens: how little a block wastes then
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

import m2_batching
from m3_paged.tools.layout_report import print_heading, print_report, round_figures, write_markdown
from milestone_llm.bench.command import positive
from milestone_llm.bench.measure import Contestant, Progress, RunResult, engine_contestant, measure
from milestone_llm.bench.report import describe_work, environment
from milestone_llm.bench.workloads import WorkItem, mixed
from milestone_llm.cli import Formatter, console, log_console, run_command
from milestone_llm.models.checkpoint import DEFAULT_MODEL, LoadedModel, load_model
from milestone_llm.trace.kv_figures import KVFigures
from milestone_llm.trace.tracer import Tracer

from .engine import LLMEngine


def parser() -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog="python -m m3_paged.bench", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="HF id, folder, GGUF file or tiny-llama")
    add("--layout", choices=("slot", "block", "both"), default="both", help="who is measured")
    add("--num-prompts", type=positive, default=32, metavar="N", help="requests, all at the start")
    for name, what in (("input", "a prompt"), ("output", "an output")):
        for end, default in (("min", 16), ("max", 128)):
            add(
                f"--{end}-{name}-len",
                type=positive,
                default=default,
                metavar="N",
                help=f"{end}imum tokens of {what}; lengths are drawn uniformly",
            )
    add(
        "--max-model-len",
        type=positive,
        default=1024,
        metavar="N",
        help="tokens a request may have",
    )
    add(
        "--kv-cache-tokens",
        type=positive,
        metavar="N",
        help="KV memory of either layout (default: 4 slots, 4 * max_model_len)",
    )
    add("--block-size", type=positive, default=16, metavar="N", help="tokens of a KV block")
    add(
        "--max-num-seqs",
        type=positive,
        metavar="N",
        help="rows of a step with blocks (default: all requests, at most 256); slots bound "
        "themselves",
    )
    add("--preemption", choices=("recompute", "swap"), default="recompute", help="with blocks")
    add("--equal-concurrency", action="store_true", help="memory and rows for all, in both layouts")
    add("--rounds", type=positive, default=3, metavar="N", help="slot and block take turns")
    add("--seed", type=int, default=0, help="of lengths and prompts")
    add("--dtype", help="float32, bfloat16, float16 (default: float32 on a CPU, else bfloat16)")
    add("--device", help="cpu, cuda, cuda:1... (default: CUDA where there is one)")
    add("--threads", type=positive, metavar="N", help="CPU threads (default: what torch takes)")
    add("--json", type=Path, metavar="PATH", help="write everything measured there")
    add("--markdown", type=Path, metavar="PATH", help="write a table there, a row each round")
    return parser


def bench(args: argparse.Namespace) -> dict[str, Any]:
    """Build, warm up, measure, report.

    Returns:
        What `--json` writes.

    Raises:
        ValueError: lengths the wrong way round, requests that do not fit, or memory for no slot.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    loaded = load_model(args.model, dtype=args.dtype, device=args.device)
    items = make_work(args, loaded.model.config.get_text_config().vocab_size)
    layouts = ["slot", "block"] if args.layout == "both" else [args.layout]
    engines = {layout: build_engine(layout, args, loaded) for layout in layouts}
    any_engine = next(iter(engines.values()))
    data: dict[str, Any] = {
        "model": loaded.name,
        "workload": describe_work("mixed", items, args.seed),
        "environment": environment(any_engine),
        "engines": {
            layout: {"milestone": engine.milestone, **asdict(engine.config)}
            for layout, engine in engines.items()
        },
    }
    print_heading(console, data)
    results = measure(
        [traced_contestant(layout, engine) for layout, engine in engines.items()],
        items,
        args.rounds,
        lambda name, number: lambda num_new: None,
        lambda name, number, result: log_console.print(
            f"round {number}/{args.rounds}  {name:<5} {result.seconds:8.2f} s"
        ),
    )
    data["rounds"] = {
        layout: [round_figures(result) for result in runs] for layout, runs in results.items()
    }
    data["same_tokens"] = num_same(results, layouts)
    print_report(console, data)
    for path, write in ((args.json, write_json), (args.markdown, write_markdown)):
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, data)
            console.print(f"written: {path}", markup=False, soft_wrap=True)
    return data


def make_work(args: argparse.Namespace, vocab_size: int) -> list[WorkItem]:
    """Requests of random tokens with lengths in the given ranges.

    Raises:
        ValueError: a minimum above its maximum, or requests longer than `--max-model-len`.
    """
    ranges = {}
    for name in ("input", "output"):
        low, high = getattr(args, f"min_{name}_len"), getattr(args, f"max_{name}_len")
        if low > high:
            raise ValueError(f"--min-{name}-len {low} is above --max-{name}-len {high}")
        ranges[f"{name}_len"] = (low, high)
    items = mixed(vocab_size, args.seed, num_requests=args.num_prompts, **ranges)
    longest = max(len(item.prompt) + item.params.max_tokens for item in items)
    if longest > args.max_model_len:
        raise ValueError(
            f"the longest request has {longest} tokens, but max_model_len={args.max_model_len}"
        )
    return items


def build_engine(layout: str, args: argparse.Namespace, loaded: LoadedModel) -> Any:
    """An engine over the given KV memory, in slots or in blocks.

    Raises:
        ValueError: the memory holds not even one request of `max_model_len`.
    """
    num_tokens = args.kv_cache_tokens or 4 * args.max_model_len
    max_num_seqs = args.max_num_seqs or min(args.num_prompts, 256)
    if args.equal_concurrency:
        blocks_a_request = -(-args.max_model_len // args.block_size)
        num_tokens = max_num_seqs * blocks_a_request * args.block_size
    num_slots = min(num_tokens // args.max_model_len, max_num_seqs)
    if num_slots < 1:
        raise ValueError(
            f"{num_tokens} tokens of KV memory hold no request of max_model_len="
            f"{args.max_model_len}: raise --kv-cache-tokens or lower --max-model-len"
        )
    fields = {
        "tokenizer": loaded.tokenizer,
        "max_model_len": args.max_model_len,
        "max_num_batched_tokens": max(2048, args.max_model_len),
    }
    if layout == "slot":
        return m2_batching.LLMEngine(loaded.model, max_num_seqs=num_slots, **fields)
    return LLMEngine(
        loaded.model,
        max_num_seqs=max_num_seqs,
        kv_cache_tokens=num_tokens,
        block_size=args.block_size,
        preemption=args.preemption,
        **fields,
    )


def traced_contestant(layout: str, engine: Any) -> Contestant:
    """An engine whose every step is recorded, for its KV memory tells only then how it was used."""
    contestant = engine_contestant(engine)

    def run(items: Sequence[WorkItem], progress: Progress) -> RunResult:
        engine.tracer = Tracer()
        result = contestant.run(items, progress)
        figures = KVFigures.of(engine.tracer.records)
        numbers = {name: value for name, value in asdict(figures).items() if name != "unit"}
        result.facts |= {**numbers, "waste_share": figures.waste_share}
        return result

    return replace(contestant, name=layout, run=run)


def num_same(results: dict[str, list[RunResult]], layouts: Sequence[str]) -> int | None:
    """How many requests got the same tokens in both layouts; None if only one was measured."""
    if len(layouts) < 2:
        return None
    slot, block = (results[layout][0].token_ids for layout in layouts)
    return sum(own == other for own, other in zip(slot, block, strict=True))


def write_json(path: Path, data: dict[str, Any]) -> None:
    """All that was set and measured."""
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_command(bench, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
