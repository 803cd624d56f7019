"""How fast is the engine, and against what? `python -m m1_single.bench --baseline hf`

Every milestone has this command. Requests are random tokens, all there at the start; each gets its
full number of output tokens, so that everybody does the same work in the same process.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from milestone_llm.cli import Formatter, console, log_console, progress_bar, run_command
from milestone_llm.models.checkpoint import DEFAULT_MODEL, load_model

from .hf_baselines import hf_one_by_one, hf_static
from .measure import Contestant, Progress, RunResult, engine_contestant, measure
from .report import as_data, describe_work, print_heading, print_report
from .workloads import WORKLOADS, WorkItem

Baselines = Mapping[str, Callable[[Any, Sequence[WorkItem]], Contestant]]
"""From the name on the command line to what makes a contestant of an engine and its work."""

BASELINES: Baselines = {
    "one-by-one": lambda engine, items: hf_one_by_one(engine.model),
    "static": lambda engine, items: hf_static(engine.model, engine.config.max_num_seqs),
}
"""What every milestone can be compared with."""


def main(
    engine_class: type[LLMEngine],
    arguments: Sequence[str] | None = None,
    *,
    description: str | None = None,
    baselines: Baselines = BASELINES,
) -> int:
    """The command line of any milestone's bench.

    Args:
        engine_class: whose bench it is.
        arguments: instead of the command line.
        baselines: what `--baseline` can name; "hf" stands for all of them.

    Returns:
        The exit status.
    """
    parser = bench_parser(engine_class, baselines, description)
    args = parser.parse_args(arguments)
    return run_command(lambda args: run_bench(engine_class, args, baselines), args)


def bench_parser(
    engine_class: type[LLMEngine], baselines: Baselines, description: str | None = None
) -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {engine_class.milestone}.bench",
        description=description or __doc__,
        formatter_class=Formatter,
    )
    add = parser.add_argument
    add("--model", default=DEFAULT_MODEL, help="HF id, folder, GGUF file or tiny-llama")
    add("--workload", choices=sorted(WORKLOADS), default="mixed", help="kind of requests")
    add("--num-requests", type=positive, metavar="N", help="instead of the workload's own number")
    for name, what in (("input", "prompt"), ("output", "output")):
        add(
            f"--{name}-len",
            type=positive,
            nargs=2,
            metavar=("MIN", "MAX"),
            help=f"tokens of a {what}, uniformly drawn, instead of the workload's own range",
        )
    add("--seed", type=int, default=0, help="of lengths, prompts and sampling")
    add(
        "--baseline",
        nargs="+",
        choices=["hf", *baselines],
        default=[],
        help="compare with Hugging Face doing the same work; hf: with all of the others",
    )
    add("--rounds", type=positive, default=1, help="repeat, and report the median and the spread")
    add("--max-num-seqs", type=positive, help="rows of a step (default: all requests, at most 256)")
    add("--max-num-batched-tokens", type=positive, default=2048, help="tokens of a step")
    add("--max-model-len", type=positive, help="tokens of a request (default: the longest's)")
    add(
        "--set",
        nargs="+",
        default=[],
        metavar="FIELD=VALUE",
        help="further fields of the engine's EngineConfig",
    )
    add("--dtype", help="float32, bfloat16, float16 (default: float32 on a CPU, else bfloat16)")
    add("--device", help="cpu, cuda, cuda:1... (default: CUDA where there is one)")
    add("--threads", type=positive, help="CPU threads (default: what torch takes)")
    add("--json", type=Path, metavar="PATH", help="write everything measured there")
    return parser


def positive(text: str) -> int:
    """An argparse type: a whole number above 0."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def run_bench(
    engine_class: type[LLMEngine], args: argparse.Namespace, baselines: Baselines
) -> dict[str, Any]:
    """Build, warm up, measure, report.

    Returns:
        What `--json` writes.

    Raises:
        ValueError: limits that do not fit the model or the workload, or an unknown field.
    """
    if args.threads:
        torch.set_num_threads(args.threads)
    loaded = load_model(args.model, dtype=args.dtype, device=args.device)
    items = make_work(args, loaded.model.config.get_text_config().vocab_size)
    longest = max(len(item.prompt) + item.params.max_tokens for item in items)
    engine = engine_class(
        loaded.model,
        tokenizer=loaded.tokenizer,
        max_num_seqs=args.max_num_seqs or min(len(items), 256),
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_model_len=args.max_model_len or longest,
        **config_fields(args.set),
    )
    if longest > engine.max_model_len:
        raise ValueError(
            f"the longest request has {longest} tokens, but max_model_len={engine.max_model_len}"
        )
    chosen = list(baselines) if "hf" in args.baseline else list(dict.fromkeys(args.baseline))
    contestants = [engine_contestant(engine), *(baselines[name](engine, items) for name in chosen)]

    work = describe_work(args.workload, items, args.seed)
    print_heading(console, work, engine, loaded.name)
    results = _measure_with_progress(contestants, items, args.rounds)
    data = as_data(engine, loaded.name, work, results)
    print_report(console, data)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        console.print(f"\nwritten: {args.json}", soft_wrap=True)
    return data


def make_work(args: argparse.Namespace, vocab_size: int) -> list[WorkItem]:
    """The requests that the options describe.

    Raises:
        ValueError: a range whose MIN is above its MAX.
    """
    sizes: dict[str, Any] = {}
    if args.num_requests:
        sizes["num_requests"] = args.num_requests
    for name in ("input_len", "output_len"):
        if ends := getattr(args, name):
            if ends[0] > ends[1]:
                option = name.replace("_", "-")
                raise ValueError(f"--{option}: MIN {ends[0]} is above MAX {ends[1]}")
            sizes[name] = tuple(ends)
    return WORKLOADS[args.workload](vocab_size, args.seed, **sizes)


def config_fields(settings: Sequence[str]) -> dict[str, Any]:
    """`block_size=32` as `{"block_size": 32}`; what is no JSON value is a string.

    Raises:
        ValueError: a setting without `=`.
    """
    fields = {}
    for setting in settings:
        name, equals, value = setting.partition("=")
        if not equals:
            raise ValueError(f"--set takes FIELD=VALUE, got {setting!r}")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields


def _measure_with_progress(
    contestants: Sequence[Contestant], items: Sequence[WorkItem], rounds: int
) -> dict[str, list[RunResult]]:
    total = sum(item.params.max_tokens for item in items)
    with progress_bar() as bar:
        task = bar.add_task("", count="")

        def on_run(name: str, number: int) -> Progress:
            what = f"round {number}/{rounds}" if number else "warm-up"
            bar.reset(
                task, description=f"{what}  {name}", total=total if number else None, count=""
            )
            num_tokens = 0

            def progress(num_new: int) -> None:
                nonlocal num_tokens
                num_tokens += num_new
                bar.update(task, completed=num_tokens, count=f"{num_tokens:,} tokens")

            return progress

        def on_done(name: str, number: int, result: RunResult) -> None:
            speed = total / result.seconds
            log_console.print(
                f"round {number}/{rounds}  {name:<16} {speed:>10,.1f} tok/s {result.seconds:8.2f} s"
            )

        return measure(contestants, items, rounds, on_run, on_done)
