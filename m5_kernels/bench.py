"""How fast is the engine with its own kernels? `python -m m5_kernels.bench`

On a GPU: the `nano` workload on a model of Qwen3-0.6B's shape, with random weights unless --model
names others. On a CPU: `mixed` on SmolLM2-135M with the kernels' torch twins, as the benches of
the other milestones. Before anything is timed, tokens are compared with M4's on the same device.

  --single                             one request: 100 tokens in, 512 out
  --engines m1 m2 m3 m4 m5             the whole ladder on the same work
  --without graphs pipelining          what each of them brings; a+b: both off together
  --profile                            where a step's time goes
  --kernel decode                      a kernel against its ceiling and FlashAttention-3 (GPU only)
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from m5_kernels.tools.bench_limits import RunLimit, limit_lines, limit_text
from m5_kernels.tools.bench_profile import print_profile, profile_steps
from m5_kernels.tools.bench_work import (
    FIELDS,
    KERNELS,
    MILESTONES,
    capture_graphs,
    check_against_m4,
    engine_class,
    fields_of,
    qwen3_shape,
    switched_off,
)
from milestone_llm.bench.command import bench_parser, config_fields, make_work
from milestone_llm.bench.measure import Contestant, Progress, RunResult, engine_contestant, measure
from milestone_llm.bench.report import as_data, describe_work, print_heading, print_report
from milestone_llm.bench.workloads import WorkItem
from milestone_llm.cli import console, log_console, run_command
from milestone_llm.models.checkpoint import DEFAULT_MODEL, load_model

from .engine import LLMEngine

KERNEL_TABLES = ("decode", "split", "prefill", "elementwise", "sample")


@dataclass(frozen=True)
class Entrant:
    """An engine that is to be built, measured and thrown away again: two may not fit beside
    each other on a GPU."""

    name: str
    milestone: str
    fields: dict[str, Any]
    """Of its configuration."""
    off: set[str] = field(default_factory=set)
    """Kernels of M5 that PyTorch's take the place of."""


def parser() -> argparse.ArgumentParser:
    """The options of all benches but `--baseline`, and those that only M5 has."""
    parser = bench_parser(LLMEngine, {}, __doc__)
    parser.set_defaults(model=None, workload=None, max_num_batched_tokens=None)
    add = parser.add_argument
    add("--single", action="store_true", help="one request, 100 tokens in and 512 out")
    add("--engines", nargs="+", choices=MILESTONES, default=["m5"], help="whom to measure")
    add(
        "--without",
        nargs="+",
        metavar="PART",
        default=[],
        help=f"measure M5 once more without {', '.join((*FIELDS, *KERNELS))}",
    )
    add("--profile", action="store_true", help="print where the time of a step goes")
    add("--kernel", choices=(*KERNEL_TABLES, "all"), help="measure kernels instead of engines")
    add("--no-check", action="store_true", help="do not compare tokens with M4's first")
    return parser


def run_bench(args: argparse.Namespace) -> dict[str, Any]:
    """Check, build, warm up, measure, report.

    Returns:
        What `--json` writes; empty with `--kernel`.

    Raises:
        ValueError: limits that do not fit the model or the workload, an unknown field or part, or
            `--kernel` without a GPU.
        RuntimeError: M5's tokens are not M4's.
    """
    if args.kernel:
        measure_kernels(args.kernel)
        return {}
    if args.threads:
        torch.set_num_threads(args.threads)
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    entrants = planned_entrants(args)
    if not args.no_check:
        console.print(f"Checked: {check_against_m4(device)}.\n")
    is_own_shape = on_gpu and args.model is None
    loaded = (
        qwen3_shape(device)
        if is_own_shape
        else load_model(args.model or DEFAULT_MODEL, dtype=args.dtype, device=device)
    )
    args.workload = args.workload or ("nano" if on_gpu else "mixed")
    if args.single:
        args.num_requests = 1
        args.input_len, args.output_len = args.input_len or (100, 100), args.output_len or [512] * 2
    items = make_work(args, loaded.model.config.get_text_config().vocab_size)
    limits = step_limits(args, items, on_gpu, is_alone=len(entrants) == 1)

    results: dict[str, list[RunResult]] = {}
    for entrant in entrants:
        engine = build(entrant, loaded, limits, items)
        if entrant is entrants[-1]:
            print_heading(
                console, describe_work(args.workload, items, args.seed), engine, loaded.name
            )
        with switched_off(entrant.off):
            results[entrant.name] = run_rounds(entrant.name, engine, items, args.rounds, on_gpu)
        if entrant is not entrants[-1]:
            del engine
            gc.unfreeze()
            gc.collect()  # engines hold graphs that hold memory
            gc.freeze()  # the collector need not go through results while others are measured
            if on_gpu:
                torch.cuda.empty_cache()
    name = entrants[-1].name
    results = {name: results.pop(name), **results}  # the engine that others are compared with
    work = describe_work(args.workload, items, args.seed)
    data = {**as_data(engine, loaded.name, work, results), "without": args.without}
    print_report(console, data)
    if on_gpu:
        data["limit"] = report_limit(engine, items, data)
    if args.profile:
        if not hasattr(engine.runner, "launch"):
            raise ValueError(f"--profile is for M5's own runner, not for {engine.milestone}'s")
        if hasattr(engine, "reset_prefix_cache"):
            engine.reset_prefix_cache()
        profiled = profile_steps(engine, items)
        print_profile(console, profiled)
        data["profile"] = asdict(profiled)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        console.print(f"\nwritten: {args.json}", soft_wrap=True)
    return data


def planned_entrants(args: argparse.Namespace) -> list[Entrant]:
    """Whom to measure, in this order; the last one is the engine that the others are compared with.

    Raises:
        ValueError: a part that cannot be switched off, or a field that no configuration has.
    """
    given = config_fields(args.set)
    milestones = sorted(set(args.engines))
    if args.without and "m5" not in milestones:
        raise ValueError("--without switches parts of m5 off: add m5 to --engines")
    engine_class(milestones[-1]).config_class.from_fields(**given)
    entrants = [
        Entrant(MILESTONES[name], name, fields_of(engine_class(name), given)) for name in milestones
    ]
    without = []
    for combination in args.without:
        fields: dict[str, Any] = dict(given)
        off = set()
        for part in combination.split("+"):
            if part not in FIELDS and part not in KERNELS:
                parts = ", ".join((*FIELDS, *KERNELS))
                raise ValueError(f"--without {part}: there is {parts}")
            fields |= FIELDS.get(part, {})
            off |= {part} & set(KERNELS)
        without.append(Entrant(f"- {combination}", "m5", fields, off))
    return entrants[:-1] + without + entrants[-1:]


def step_limits(
    args: argparse.Namespace, items: Sequence[WorkItem], on_gpu: bool, is_alone: bool
) -> dict[str, Any]:
    """Rows and tokens of a step, tokens of a request, and on a GPU KV memory for all rows.

    Raises:
        ValueError: a request is longer than `--max-model-len`.
    """
    longest = max(len(item.prompt) + item.params.max_tokens for item in items)
    max_model_len = args.max_model_len or (max(longest, 4096) if on_gpu and is_alone else longest)
    if longest > max_model_len:
        raise ValueError(
            f"the longest request has {longest} tokens, but max_model_len={max_model_len}"
        )
    num_seqs = args.max_num_seqs or min(len(items), 256)
    limits = {
        "max_num_seqs": num_seqs,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": args.max_num_batched_tokens or (16384 if on_gpu else 2048),
    }
    if on_gpu:
        sizes = sorted(len(item.prompt) + item.params.max_tokens for item in items)
        limits["kv_cache_tokens"] = max(max_model_len, sum(sizes[-num_seqs:])) + 64 * num_seqs
    return limits


def build(entrant: Entrant, loaded: Any, limits: dict[str, Any], items: Sequence[WorkItem]) -> Any:
    """An engine that is about to be measured."""
    kind = engine_class(entrant.milestone)
    fields = fields_of(kind, limits)
    if entrant.milestone == "m1":  # its prompts are a rectangle, and count with their padding
        width = max(len(item.prompt) for item in items)
        fields["max_num_batched_tokens"] = max(
            fields["max_num_batched_tokens"], width * fields["max_num_seqs"]
        )
    return kind(loaded.model, tokenizer=loaded.tokenizer, **{**fields, **entrant.fields})


def run_rounds(
    name: str, engine: Any, items: Sequence[WorkItem], rounds: int, on_gpu: bool
) -> list[RunResult]:
    """Warm up, then one result a round. On a GPU every kernel and graph is there before it."""
    inner = engine_contestant(engine)
    if on_gpu and engine.milestone == "m5_kernels":
        capture_graphs(engine)
        whole = [WorkItem(item.prompt[::-1], item.params) for item in items]  # no cache knows them
        inner.run(whole, lambda _: None)

    def on_run(_: str, number: int) -> Progress:
        if log_console.is_terminal and not number:
            log_console.print(f"warm-up    {name}")
        return lambda _: None

    def on_done(_: str, number: int, result: RunResult) -> None:
        speed = sum(map(len, result.token_ids)) / result.seconds
        log_console.print(
            f"round {number}/{rounds}  {name:<16} {speed:>10,.1f} tok/s {result.seconds:8.2f} s"
        )

    return measure([Contestant(name, inner.run)], items, rounds, on_run, on_done)[name]


def report_limit(engine: Any, items: Sequence[WorkItem], data: dict[str, Any]) -> dict[str, Any]:
    """Print how near the main engine came to what this GPU could do at best."""
    from m5_kernels.tools.measure import Ceilings

    median = data["contestants"][engine.milestone]["median"]
    limit = RunLimit.of(engine.model, items, median["steps"])
    num_tokens = data["workload"]["output_tokens"]
    lines = limit_lines(limit, Ceilings.measure(), median["seconds"], num_tokens)
    console.print()
    console.print(limit_text(lines))
    return lines


def measure_kernels(table: str) -> None:
    """Print one kernel table, or all.

    Raises:
        ValueError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("--kernel measures kernels on a GPU, and torch sees none here")
    from m5_kernels.tools.kernel_bench import BENCHES
    from m5_kernels.tools.measure import Ceilings
    from m5_kernels.tools.split_bench import bench_split

    ceilings = Ceilings.measure()
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}: read "
        f"{ceilings.read_gbps:.0f} GB/s, copy {ceilings.copy_gbps:.0f} GB/s, "
        f"bf16 matmul {ceilings.matmul_tflops:.0f} TFLOP/s"
    )
    for name, bench in {**BENCHES, "split": bench_split}.items():
        if table in (name, "all"):
            with contextlib.ExitStack() as stack:
                stack.callback(torch.cuda.empty_cache)
                bench(ceilings)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    return run_command(run_bench, parser().parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
