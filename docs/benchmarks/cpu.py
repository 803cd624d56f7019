"""What runs a small model fastest on a CPU? `python -m docs.benchmarks.cpu`

Hugging Face and the five milestones run SmolLM2-135M from the same GGUF file: one request, eight at
a time, and prompts alone. All take their turns in each round, so what else the machine does hits
them alike. Only `quantization="gguf"` computes with the file's own bits; others have its numbers in
float32, bfloat16 or in eight bits. llama.cpp's own measure of the file is its `llama-bench`.
"""

from __future__ import annotations

import argparse
import importlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from milestone_llm.command.cli import console, positive
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.bench.hf_baselines import hf_continuous, hf_static
from milestone_llm.lab.bench.record import machine, versions
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.models.checkpoint import load_model

MODEL = "smollm2-135m"
WORK = {
    "1 request": (1, 64, 64),
    "8 requests": (8, 64, 64),
    "256 in": (1, 256, 1),
    "1,024 in": (1, 1024, 1),
}
"""Requests, tokens in, tokens out."""
ENGINES = {
    "M1": ("m1_single", {}),
    "M2": ("m2_batching", {}),
    "M3": ("m3_paged", {}),
    "M4": ("m4_prefix_chunked", {}),
    "M5": ("m5_kernels", {}),
    "M5, bfloat16": ("m5_kernels", {"dtype": "bfloat16"}),
    "M5, eight bits": ("m5_kernels", {"quantization": "int8"}),
    "M5, the file's bits": ("m5_kernels", {"quantization": "gguf"}),
}
Items = Sequence[WorkItem]
Runs = Callable[[Items], object]


def work(shape: tuple[int, int, int], seed: int) -> list[WorkItem]:
    """Requests with random prompts, which have nothing in common."""
    num_requests, num_in, num_out = shape
    rng = random.Random(seed)
    params = SamplingParams(temperature=0, max_tokens=num_out, ignore_eos=True)
    return [
        WorkItem([rng.randrange(5, 40_000) for _ in range(num_in)], params)
        for _ in range(num_requests)
    ]


def contestants(names: Sequence[str] | None) -> dict[str, Runs]:
    """Who takes part, by name; all are loaded before anything is timed."""
    runs: dict[str, Runs] = {}

    def wanted(name: str) -> bool:
        is_wanted = names is None or name in names
        if is_wanted:
            console.print(f"loading {name}", style="dim")
        return is_wanted

    hf = load_model(MODEL, device="cpu").model
    limits = {"max_num_seqs": 8, "max_model_len": 1536, "max_num_batched_tokens": 2048}
    if wanted("HF one by one"):
        runs["HF one by one"] = lambda items: hf_static(hf, 1, items, ignored)
    if wanted("HF batch"):
        runs["HF batch"] = lambda items: hf_static(hf, 8, items, ignored)
    if wanted("HF continuous"):
        m2 = importlib.import_module("m2_batching").LLMEngine(hf, **limits)
        runs["HF continuous"] = lambda items: hf_continuous(m2, items, ignored)
    for name, (package, options) in ENGINES.items():
        if wanted(name):
            engine = importlib.import_module(package).LLMEngine
            runs[name] = partial(generate, engine(MODEL, device="cpu", **limits, **options))
    return runs


def ignored(num_tokens: int) -> None:
    """Progress that nobody looks at."""


def generate(engine: Any, items: Items) -> None:
    """All requests at once."""
    engine.generate([item.prompt for item in items], [item.params for item in items])
    if hasattr(engine, "reset_prefix_cache"):
        engine.reset_prefix_cache()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table a kind of work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=positive, default=3)
    parser.add_argument("--threads", type=positive, default=None, help="default: torch's")
    parser.add_argument("--work", nargs="+", choices=WORK, default=list(WORK))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of those who take part")
    args = parser.parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    threads = torch.get_num_threads()
    runs = contestants(args.only)
    console.print(f"{MODEL} from one GGUF file, {threads} threads; {machine()}; {versions()}")
    console.print(f"tokens a second, medians of {args.rounds} rounds in turns (slowest..fastest)")
    rates: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    for kind in args.work:
        num_requests, num_in, num_out = WORK[kind]
        num_tokens = num_requests * (num_out if num_out > 1 else num_in)
        for round_ in range(args.rounds + 1):
            for name, run in runs.items():
                items = work(WORK[kind], round_)
                start = time.perf_counter()
                run(items)
                if round_:  # the one before is not counted
                    rate = num_tokens / (time.perf_counter() - start)
                    rates[name].setdefault(kind, []).append(rate)

    def cell(rates: list[float]) -> str:
        return f"{statistics.median(rates):,.0f} ({min(rates):,.0f}..{max(rates):,.0f})"

    rows = [[name, *map(cell, own.values())] for name, own in rates.items()]
    console.print(table("", ["", *args.work], rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
