"""The bench of engines: M5 beside the milestones before it, and beside itself without a part.

Engines are built, measured and thrown away again: two may not fit beside each other on a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from m5_kernels.extras.tensor_parallel.ranks import Ranks
from milestone_llm import MILESTONES
from milestone_llm.command.cli import config_fields, console
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.compare import Bench
from milestone_llm.lab.bench.measure import Results, measure, run_engine
from milestone_llm.lab.bench.workloads import WorkItem

from .bench_all_reduce import print_all_reduces
from .bench_limits import limit_text, seconds_at_best
from .bench_parts import FIELDS, OBJECTS, check_against_m4
from .bench_profile import profile_steps
from .measure import Ceilings

PACKAGES = {name[:2]: name for name in MILESTONES}
"""By the short names of the command line: `m1`."""


@dataclass(frozen=True)
class Variant:
    """An engine that is to be measured."""

    name: str
    milestone: str = "m5"
    fields: dict[str, Any] = field(default_factory=dict)
    """Of its configuration, beside those of the command line."""
    without: Sequence[str] = ()
    """Parts of `OBJECTS` that are switched off."""


def compare_engines(bench: Bench) -> None:
    """Check, build, warm up, measure, report.

    Raises:
        InputError: limits that do not fit the model or the workload, or an unknown field or part.
        RuntimeError: M5's tokens are not M4's.
    """
    args = bench.args
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu = device.startswith("cuda")
    if bench.num_ranks > 1:
        if set(args.engines) != {"m5"} or args.baseline or args.profile:
            raise InputError("--tensor-parallel-size compares M5 on several GPUs with M5 on one")
        if on_gpu:
            Ranks.join(bench.num_ranks, args.device)  # from here on "cuda" is the rank's own GPU
    *others, main = planned_variants(args)
    if not args.no_check:
        console.print(f"Checked: {check_against_m4(device)}.\n")
    set_defaults(args, on_gpu)
    items = bench.make_work()
    if on_gpu:
        set_memory(bench, items, is_alone=not others)
    elif args.without:
        console.print("On a CPU there are no graphs, and kernels are their twins anyway.\n")
    earlier: Results = {}
    for variant in others:
        earlier |= measure_alone(bench, variant, items, on_gpu)
        gc.unfreeze()
        gc.collect()  # engines hold graphs that hold memory
        gc.freeze()  # the collector need not go through results while others are measured
        if on_gpu:
            torch.cuda.empty_cache()
    engine = build(bench, main, items)
    if on_gpu:
        warm_up(engine, items)
    contestants = {main.name: engine, **bench.baselines(engine, items)}
    data = bench.compare(args.workload, items, contestants, earlier=earlier, has_bar=not on_gpu)
    data["without"] = args.without
    if on_gpu and bench.num_ranks > 1:
        data["all_reduces"] = print_all_reduces(engine)
    elif on_gpu:
        data["seconds_at_best"] = report_limit(engine, items, data)
    if args.profile:
        if hasattr(engine, "reset_prefix_cache"):
            engine.reset_prefix_cache()
        data["profile"] = profile_steps(engine, items)


def planned_variants(args: argparse.Namespace) -> list[Variant]:
    """Whom to measure, in this order; the last one is the engine that the others are compared with.

    Raises:
        InputError: a part that cannot be switched off, or a field that no configuration has.
    """
    milestones = sorted(set(args.engines))
    if args.without and "m5" not in milestones:
        raise InputError("--without switches parts of m5 off: add m5 to --engines")
    newest = importlib.import_module(PACKAGES[milestones[-1]])
    newest.EngineConfig.from_fields(**config_fields(args.set))
    *variants, main = (Variant(PACKAGES[name], name) for name in milestones)
    if args.tensor_parallel_size > 1:
        variants.append(Variant("m5_kernels, one rank", fields={"tensor_parallel_size": 1}))
    for combination in args.without:
        fields: dict[str, Any] = {}
        replaced = []
        for part in combination.split("+"):
            if part in OBJECTS:
                replaced.append(part)
            elif part in FIELDS:
                fields |= FIELDS[part]
            else:
                names = ", ".join((*FIELDS, *OBJECTS))
                raise InputError(f"--without {part}: there is {names}")
        variants.append(Variant(f"- {combination}", fields=fields, without=replaced))
    return [*variants, main]


def set_defaults(args: argparse.Namespace, on_gpu: bool) -> None:
    """Fill in what was not given and depends on the device."""
    args.model = args.model or ("random-qwen3-0.6b" if on_gpu else "smollm2-135m")
    args.workload = args.workload or ("nano" if on_gpu else "mixed")
    args.max_num_batched_tokens = args.max_num_batched_tokens or (16384 if on_gpu else 2048)
    if args.single:
        args.num_requests = 1
        args.input_len = args.input_len or (100, 100)
        args.output_len = args.output_len or (512, 512)


def set_memory(bench: Bench, items: Sequence[WorkItem], is_alone: bool) -> None:
    """On a GPU: KV memory for all rows at their full length, unless `--set` says otherwise."""
    limits, args = bench.limits(items), bench.args
    if is_alone and args.max_model_len is None:
        args.max_model_len = max(limits["max_model_len"], 4096)
    sizes = sorted(len(item.prompt) + item.params.max_tokens for item in items)
    num_seqs, longest = limits["max_num_seqs"], args.max_model_len or limits["max_model_len"]
    num_tokens = max(longest, sum(sizes[-num_seqs:])) + 64 * num_seqs
    args.set = [f"kv_cache_tokens={num_tokens}", *args.set]


def build(bench: Bench, variant: Variant, items: Sequence[WorkItem]) -> Any:
    """An engine that is about to be measured."""
    fields = dict(variant.fields)
    if bench.num_ranks > 1:
        fields.setdefault("tensor_parallel_size", bench.num_ranks)
    if variant.milestone == "m1":  # its prompts are a rectangle, and count with their padding
        limits, width = bench.limits(items), max(len(item.prompt) for item in items)
        num_tokens = max(limits["max_num_batched_tokens"], width * limits["max_num_seqs"])
        fields["max_num_batched_tokens"] = num_tokens
    engine = bench.engine(items, PACKAGES[variant.milestone], **fields)
    for part in variant.without:
        OBJECTS[part](engine)
    return engine


def measure_alone(
    bench: Bench, variant: Variant, items: Sequence[WorkItem], on_gpu: bool
) -> Results:
    """One result a round of an engine that is gone afterwards."""
    engine = build(bench, variant, items)
    if on_gpu:
        warm_up(engine, items)
    return measure({variant.name: engine}, items, bench.args.rounds, has_bar=not on_gpu)


def warm_up(engine: Any, items: Sequence[WorkItem]) -> None:
    """Every kernel and graph of M5 is there before anything is measured."""
    if engine.milestone == "m5_kernels":
        engine.capture_graphs()
        whole = [WorkItem(item.prompt[::-1], item.params) for item in items]  # no cache knows them
        run_engine(engine, whole, lambda _: None)


def report_limit(engine: Any, items: Sequence[WorkItem], data: dict[str, Any]) -> dict[str, float]:
    """Print how near the main engine came to what this GPU could do at best."""
    median = data["contestants"][engine.milestone]["median"]
    bits = 8 if getattr(engine.config, "quantization", None) else 0
    ceilings = Ceilings.measure()
    best = seconds_at_best(engine.model, items, median["steps"], ceilings, bits)
    num_tokens = data["workload"]["output_tokens"]
    console.print(f"\n{limit_text(best, ceilings, median['seconds'], num_tokens)}")
    return best
