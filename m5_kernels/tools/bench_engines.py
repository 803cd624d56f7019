"""The bench of engines: M5 beside the milestones before it, and beside itself without a part.

Engines are built, measured and thrown away again: two may not fit beside each other on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from m5_kernels.tensor_parallel.ranks import Ranks
from m5_kernels.sampler import Needs
from milestone_llm import MILESTONES
from milestone_llm.lab.bench.command import Bench
from milestone_llm.lab.bench.contest import Contest, Results
from milestone_llm.lab.bench.measure import engine_contestant, measure
from milestone_llm.lab.bench.report import STANDARD_TABLES, losses
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.cli import config_fields, console

from .bench_all_reduce import print_all_reduces
from .bench_limits import RunLimit, limit_lines, limit_text
from .bench_parts import FIELDS, KERNELS, check_against_m4, switched_off
from .bench_profile import kernel_times, print_kernels, print_profile, profile_steps
from .compiled import check_compiler, compiled

PACKAGES = {name[:2]: name for name in MILESTONES}
"""By the short names of the command line: `m1`."""


@dataclass(frozen=True)
class Entrant:
    """An engine that is to be measured."""

    name: str
    milestone: str
    fields: dict[str, Any] = field(default_factory=dict)
    """Of its configuration, beside those of the command line."""
    off: set[str] = field(default_factory=set)
    """Kernels of M5 that PyTorch's take the place of."""
    compiled: str | None = None
    """What of M5 `torch.compile` makes; see `compiled`."""


def compare_engines(bench: Bench) -> None:
    """Check, build, warm up, measure, report.

    Raises:
        ValueError: limits that do not fit the model or the workload, or an unknown field or part.
        RuntimeError: M5's tokens are not M4's.
    """
    args = bench.args
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if bench.num_ranks > 1:
        if set(args.engines) != {"m5"} or args.baseline or args.profile:
            raise ValueError("--tensor-parallel-size compares M5 on several GPUs with M5 on one")
        if not device.startswith("cpu"):  # each rank's "cuda" is its own
            torch.cuda.set_device(Ranks.join(bench.num_ranks, args.device).device)
    on_gpu = device.startswith("cuda")
    entrants = planned_entrants(args)
    last = entrants[-1]
    if args.profile and last.milestone != "m5":
        raise ValueError(f"--profile is for M5's own runner, not for {PACKAGES[last.milestone]}'s")
    if args.compile:
        check_compiler(device)
    if not args.no_check:
        console.print(f"Checked: {check_against_m4(device)}.\n")
    if on_gpu and args.model is None:
        args.model = "random-qwen3-0.6b"
    set_defaults(args, on_gpu)
    items = bench.make_work()
    if on_gpu:
        set_memory(bench, items, is_alone=len(entrants) == 1)
    elif args.without:
        for part in "+".join(args.without).split("+"):
            if part in KERNELS:
                console.print(f"--without {part} changes nothing on a CPU")
            elif part == "graphs":
                console.print("--without graphs: a CPU has none, so this is --without pipelining")

    earlier: Results = {}
    by_compiler: dict[str, Any] = {}
    for entrant in entrants[:-1]:
        earlier |= measure_alone(bench, entrant, items, on_gpu, by_compiler)
        gc.unfreeze()
        gc.collect()  # engines hold graphs that hold memory
        gc.freeze()  # the collector need not go through results while others are measured
        if on_gpu:
            torch.cuda.empty_cache()
    engine = build(bench, last, items)
    if on_gpu:
        warm_up(engine, items)
    contest = Contest(
        args.workload,
        items,
        [engine_contestant(engine), *bench.baselines(engine)],
        STANDARD_TABLES,
        losses,
        measure=partial(measure, has_bar=not on_gpu),
        earlier=earlier,
    )
    data = bench.run(contest)
    data["without"] = args.without
    if args.compile:
        data["compile"] = by_compiler
        print_compiled(by_compiler, step_kernels(engine))
    if bench.num_ranks > 1:
        data["all_reduces"] = print_all_reduces(engine)
    if on_gpu and bench.num_ranks == 1:
        data["limit"] = report_limit(engine, items, data)
    if args.profile:
        if hasattr(engine, "reset_prefix_cache"):
            engine.reset_prefix_cache()
        profiled = profile_steps(engine, items)
        print_profile(console, profiled)
        data["profile"] = asdict(profiled)


def planned_entrants(args: argparse.Namespace) -> list[Entrant]:
    """Whom to measure, in this order; the last one is the engine that the others are compared with.

    Raises:
        ValueError: a part that cannot be switched off, or a field that no configuration has.
    """
    milestones = sorted(set(args.engines))
    if args.without and "m5" not in milestones:
        raise ValueError("--without switches parts of m5 off: add m5 to --engines")
    newest = importlib.import_module(PACKAGES[milestones[-1]])
    newest.EngineConfig.from_fields(**config_fields(args.set))
    entrants = [Entrant(PACKAGES[name], name) for name in milestones]
    if args.tensor_parallel_size > 1:
        one = Entrant("m5_kernels, one rank", "m5", {"tensor_parallel_size": 1})
        entrants = [one, *entrants]
    without = []
    for combination in args.without:
        fields: dict[str, Any] = {}
        parts = combination.split("+")
        for part in parts:
            if part not in FIELDS and part not in KERNELS:
                names = ", ".join((*FIELDS, *KERNELS))
                raise ValueError(f"--without {part}: there is {names}")
            fields |= FIELDS.get(part, {})
        without.append(Entrant(f"- {combination}", "m5", fields, set(parts) & set(KERNELS)))
    if args.compile and "m5" not in milestones:
        raise ValueError("--compile compiles parts of m5: add m5 to --engines")
    by_compiler = [Entrant(f"compiled {scope}", "m5", compiled=scope) for scope in args.compile]
    return entrants[:-1] + without + by_compiler + entrants[-1:]


def set_defaults(args: argparse.Namespace, on_gpu: bool) -> None:
    """Fill in what was not given and depends on the device."""
    args.model = args.model or "smollm2-135m"
    args.workload = args.workload or ("nano" if on_gpu else "mixed")
    args.max_num_batched_tokens = args.max_num_batched_tokens or (16384 if on_gpu else 2048)
    if args.single:
        args.num_requests = 1
        args.input_len, args.output_len = (
            args.input_len or (100, 100),
            args.output_len or (512, 512),
        )


def set_memory(bench: Bench, items: Sequence[WorkItem], is_alone: bool) -> None:
    """On a GPU: KV memory for all rows at their full length, unless `--set` says otherwise."""
    limits, args = bench.limits(items), bench.args
    if is_alone and args.max_model_len is None:
        args.max_model_len = max(limits["max_model_len"], 4096)
    sizes = sorted(len(item.prompt) + item.params.max_tokens for item in items)
    num_seqs, longest = limits["max_num_seqs"], args.max_model_len or limits["max_model_len"]
    num_tokens = max(longest, sum(sizes[-num_seqs:])) + 64 * num_seqs
    args.set = [f"kv_cache_tokens={num_tokens}", *args.set]


def build(bench: Bench, entrant: Entrant, items: Sequence[WorkItem]) -> Any:
    """An engine that is about to be measured."""
    fields = dict(entrant.fields)
    if bench.num_ranks > 1:
        fields.setdefault("tensor_parallel_size", bench.num_ranks)
    if entrant.milestone == "m1":  # its prompts are a rectangle, and count with their padding
        width = max(len(item.prompt) for item in items)
        limits = bench.limits(items)
        fields["max_num_batched_tokens"] = max(
            limits["max_num_batched_tokens"], width * limits["max_num_seqs"]
        )
    return bench.engine(items, PACKAGES[entrant.milestone], **fields)


def measure_alone(
    bench: Bench,
    entrant: Entrant,
    items: Sequence[WorkItem],
    on_gpu: bool,
    by_compiler: dict[str, Any],
) -> Results:
    """One result a round of an engine that is gone afterwards.

    Args:
        by_compiler: gets what compiling took, and the kernels that came of it.
    """
    engine = build(bench, entrant, items)
    with switched_off(entrant.off), compiled(entrant.compiled) as compile_time:
        if on_gpu or entrant.compiled:
            warm_up(engine, items)
        contestant = engine_contestant(engine, entrant.name)
        results = measure([contestant], items, bench.args.rounds, has_bar=not on_gpu)
        if entrant.compiled:
            compile_time.stop()
            found = {"seconds": compile_time.seconds, "kernels": step_kernels(engine)}
            by_compiler[entrant.name] = found
    return results


def warm_up(engine: Any, items: Sequence[WorkItem]) -> None:
    """On a GPU every kernel and graph of M5 is there before anything is measured."""
    if engine.milestone == "m5_kernels":
        capture_graphs(engine)
        whole = [WorkItem(item.prompt[::-1], item.params) for item in items]  # no cache knows them
        engine_contestant(engine).run(whole, lambda _: None)


@torch.inference_mode()
def capture_graphs(engine: Any) -> int:
    """Capture the decode graph of every batch size now, and not in the middle of a measurement.

    Returns:
        How many there are; 0 for an engine without graphs.
    """
    graphs = getattr(getattr(engine, "runner", None), "graphs", None)
    if graphs is None:
        return 0
    graphs.step_rows.fill_(-1)  # nobody: no state changes
    for bucket in reversed(graphs.buckets):  # the largest first, the others share its memory
        graphs.replay(bucket, Needs())
    torch.cuda.synchronize()
    return len(graphs.buckets)


def step_kernels(engine: Any) -> list[tuple[str, float, float]]:
    """Kernels of the largest decode graph without attention's time, since nobody is in the step.

    Returns:
        Name, launches a step, microseconds a step; nothing where there are no graphs.
    """
    graphs = getattr(engine.runner, "graphs", None)
    if graphs is None:
        return []
    graphs.step_rows.fill_(-1)
    bucket = graphs.buckets[-1]
    return kernel_times(lambda: graphs.replay(bucket, Needs()), num_steps=5)[0]


def print_compiled(by_compiler: dict[str, Any], ours: list[tuple[str, float, float]]) -> None:
    """What compiling took, and the kernels of a step beside those written by hand."""
    for name, found in by_compiler.items():
        console.print(f"\n{name}: {found['seconds']:.0f} s in the compiler")
    for name, kernels in (("by hand", ours), *((n, f["kernels"]) for n, f in by_compiler.items())):
        if kernels:
            console.print()
            print_kernels(console, f"a decode step without contexts, {name}", kernels)


def report_limit(engine: Any, items: Sequence[WorkItem], data: dict[str, Any]) -> dict[str, Any]:
    """Print how near the main engine came to what this GPU could do at best."""
    from .measure import Ceilings

    median = data["contestants"][engine.milestone]["median"]
    limit = RunLimit.of(engine.model, items, median["steps"])
    num_tokens = data["workload"]["output_tokens"]
    lines = limit_lines(limit, Ceilings.measure(), median["seconds"], num_tokens)
    console.print()
    console.print(limit_text(lines))
    return lines
