"""The bench of engines: M5 compared with earlier milestones, and with itself without some part.

Engines are built, measured and deleted one after another: two may not fit on a GPU together.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from m5_kernels.backends import Backend
from m5_kernels.extras.tensor_parallel.ranks import Ranks
from milestone_llm import MILESTONES
from milestone_llm.cli import config_fields
from milestone_llm.consoles import console
from milestone_llm.core.errors import InputError
from milestone_llm.lab.bench.compare import Bench
from milestone_llm.lab.bench.measure import Results, measure, run_engine
from milestone_llm.lab.bench.workloads import WorkItem

from .bench_all_reduce import print_all_reduces
from .bench_limits import Bits, limit_text, seconds_at_best
from .bench_parts import FIELDS, OBJECTS, check_against_m4
from .bench_profile import profile_steps
from .measure import Ceilings

Result = TypeVar("Result")

PACKAGES = {name[:2]: name for name in MILESTONES}
"""Packages by their short names on the command line, such as `m1`."""


@dataclass(frozen=True)
class Variant:
    """An engine to be measured."""

    name: str
    milestone: str = "m5"
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of its configuration, in addition to those of the command line."""
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
            Ranks.join(bench.num_ranks, args.device)  # from now on "cuda" is the rank's own GPU
    *others, main = planned_variants(args)
    if not args.no_check:
        if on_gpu:  # in another process: after M4's work M5 would be slower here (`own_stream`)
            place = f"cuda:{torch.cuda.current_device()}" if device == "cuda" else device
            checked = call_in_new_process(check_against_m4, place)
        else:
            checked = check_against_m4(device)
        console.print(f"Checked: {checked}.\n")
    set_defaults(args, on_gpu)
    if on_gpu and set(args.engines) == {"m5"} and not args.baseline:
        bench.has_ready_model = False  # an engine that loads its model is faster: `own_stream`
    items = bench.make_work()
    if on_gpu:
        set_memory(bench, items, is_alone=not others)
    elif args.without:
        console.print("On a CPU there are no graphs, and kernels are their twins anyway.\n")
    earlier: Results = {}
    for variant in others:
        earlier |= measure_alone(bench, variant, items, on_gpu)
        gc.unfreeze()
        gc.collect()  # dead engines still hold graphs, and these hold memory
        gc.freeze()  # so that gc does not scan results while other engines are measured
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


def call_in_new_process(function: Callable[..., Result], *args: Any) -> Result:
    """Return what a function returns in a new process. Its errors are raised here."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def planned_variants(args: argparse.Namespace) -> list[Variant]:
    """Return the engines to measure, in order. The others are compared with the last one.

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
    """Fill in options that were not given and depend on the device."""
    args.model = args.model or ("random-qwen3-0.6b" if on_gpu else "smollm2-135m")
    args.workload = args.workload or ("nano" if on_gpu else "mixed")
    args.max_num_batched_tokens = args.max_num_batched_tokens or (16384 if on_gpu else 2048)
    if args.single:
        args.num_requests = 1
        args.input_len = args.input_len or (100, 100)
        args.output_len = args.output_len or (512, 512)


def set_memory(bench: Bench, items: Sequence[WorkItem], is_alone: bool) -> None:
    """On a GPU, give KV memory to all rows at their full length, unless `--set` says otherwise."""
    limits, args = bench.limits(items), bench.args
    if is_alone and args.max_model_len is None:
        args.max_model_len = max(limits["max_model_len"], 4096)
    sizes = sorted(len(item.prompt) + item.params.max_tokens for item in items)
    num_seqs, longest = limits["max_num_seqs"], args.max_model_len or limits["max_model_len"]
    num_tokens = max(longest, sum(sizes[-num_seqs:])) + 64 * num_seqs
    args.set = [f"kv_cache_tokens={num_tokens}", *args.set]


def build(bench: Bench, variant: Variant, items: Sequence[WorkItem]) -> Any:
    """Build an engine to be measured."""
    fields = dict(variant.fields)
    if bench.num_ranks > 1:
        fields.setdefault("tensor_parallel_size", bench.num_ranks)
    if variant.milestone == "m1":  # it pads prompts to one length, and the padding counts
        limits, width = bench.limits(items), max(len(item.prompt) for item in items)
        num_tokens = max(limits["max_num_batched_tokens"], width * limits["max_num_seqs"])
        fields["max_num_batched_tokens"] = num_tokens
    if variant.without:
        fields["adapt_backend"] = lambda chosen: adapted(chosen, variant.without)
    return bench.engine(items, PACKAGES[variant.milestone], **fields)


def adapted(chosen: Backend, without: Sequence[str]) -> Backend:
    """Return a backend without these parts of `OBJECTS`."""
    for part in without:
        chosen = OBJECTS[part](chosen)
    return chosen


def measure_alone(
    bench: Bench, variant: Variant, items: Sequence[WorkItem], on_gpu: bool
) -> Results:
    """Measure an engine that is deleted afterwards. Returns one result a round."""
    engine = build(bench, variant, items)
    if on_gpu:
        warm_up(engine, items)
    return measure({variant.name: engine}, items, bench.args.rounds, has_bar=not on_gpu)


def warm_up(engine: Any, items: Sequence[WorkItem]) -> None:
    """Compile every kernel and capture every graph of M5, before anything is measured."""
    if engine.milestone == "m5_kernels":
        engine.capture_graphs()
        whole = [WorkItem(item.prompt[::-1], item.params) for item in items]  # not in the cache yet
        run_engine(engine, whole, lambda _: None)


def report_limit(engine: Any, items: Sequence[WorkItem], data: dict[str, Any]) -> dict[str, float]:
    """Print how close the main engine came to the limits of this GPU."""
    median = data["contestants"][engine.milestone]["median"]
    ceilings = Ceilings.measure(in_fp8=getattr(engine.config, "quantization", None) == "fp8")
    best = seconds_at_best(engine.model, items, median["steps"], ceilings, Bits.of(engine.config))
    num_tokens = data["workload"]["output_tokens"]
    console.print(f"\n{limit_text(best, ceilings, median['seconds'], num_tokens)}")
    return best
