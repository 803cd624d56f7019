"""Compare types of GGUF files on a CPU, loss and speed: `python -m docs.benchmarks.cpu_files`

llama.cpp makes a file of each type from SmolLM2-135M's. So "exact" are the numbers of that file in
float32, M4's, and what a type loses is what is lost beside them: its own rounding, and that of the
program. Log-probabilities are those of the page's text, in prompts that are short enough to be
computed as a few rows are.

Wants `pip install llama-cpp-python`, which builds llama.cpp.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch

import m4_prefix_chunked
import m5_kernels
from docs.benchmarks.cpu import WORK as CPU_WORK
from docs.benchmarks.cpu import LlamaCpp, Runs, generate, silence
from docs.questions.m5_eight_bits import TOPICS
from milestone_llm.cli import positive
from milestone_llm.consoles import console, log_console
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.bench.record import machine, versions
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.bench.workloads import random_tokens
from milestone_llm.models.gguf_cache import packaged_gguf

TYPES = ("Q8_0", "Q6_K", "Q5_K_M", "Q4_K_M", "Q4_1", "Q4_0", "IQ4_NL", "Q3_K_M", "Q2_K")
NUM_PROMPTS, PROMPT_LEN = 16, 100  # below MANY_ROWS of int4_weight.py
LIMITS = {"max_num_seqs": 8, "max_model_len": 512, "max_num_batched_tokens": 512}
WORK = ("1 request", "8 requests", "256 in")


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the files, compare, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--types", nargs="+", default=list(TYPES), help="as llama.cpp names them")
    parser.add_argument("--rounds", type=positive, default=3)
    args = parser.parse_args(arguments)
    console.print(f"{torch.get_num_threads()} threads; {machine()}; {versions()}")
    console.print(f"perplexity of {NUM_PROMPTS} texts of {PROMPT_LEN} tokens; tokens a second of")
    console.print(f"M5 and llama.cpp, 64 tokens in and out, medians of {args.rounds} rounds")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for kind in args.types:
            log_console.print(f"making and reading {kind}", style="dim")
            rows.append(compare(made(kind, Path(folder)), kind, args.rounds))
    headings = ["file", "MB", "exact", "M5", "llama.cpp"]
    headings += [head for work in WORK for head in (f"{work}: M5", "llama.cpp")]
    console.print(table("", headings, rows))
    return 0


def made(kind: str, folder: Path) -> Path:
    """Return SmolLM2's file, converted by llama.cpp to files of a type."""
    import llama_cpp

    silence()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.allow_requantize = True
    made, given = folder / f"{kind}.gguf", packaged_gguf()[0]
    if llama_cpp.llama_model_quantize(str(given).encode(), str(made).encode(), params):
        raise RuntimeError(f"llama.cpp could not make a file of type {kind}")
    return made


def compare(file: Path, kind: str, num_rounds: int) -> list[str]:
    """Return the cells of a file's line."""
    theirs = LlamaCpp(str(file), torch.get_num_threads())
    exact = m4_prefix_chunked.LLMEngine(str(file), device="cpu", **LIMITS)
    prompts = texts(exact.tokenizer)
    perplexities = [perplexity(log_probabilities(exact, prompts))]
    del exact
    ours = m5_kernels.LLMEngine(str(file), device="cpu", quantization="gguf", **LIMITS)
    perplexities.append(perplexity(log_probabilities(ours, prompts)))
    perplexities.append(perplexity([theirs.log_probabilities(prompt) for prompt in prompts]))
    runs = [partial(generate, ours), theirs]
    rates = [rate for work in WORK for rate in speeds(runs, *CPU_WORK[work], num_rounds)]
    size = file.stat().st_size / 1e6
    return [
        kind,
        f"{size:.0f}",
        *(f"{each:.2f}" for each in perplexities),
        *map("{:.0f}".format, rates),
    ]


def texts(tokenizer: Any) -> list[list[int]]:
    """Return prompts of Python's own manual."""
    ids = tokenizer("\n\n".join(topics[topic] for topic in TOPICS))["input_ids"]
    return [ids[PROMPT_LEN * index :][:PROMPT_LEN] for index in range(NUM_PROMPTS)]


def log_probabilities(engine: Any, prompts: list[list[int]]) -> list[list[float]]:
    """Return those of each prompt's tokens but the first, each after those before it."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    return [
        [entry[token].logprob for token, entry in zip(prompt[1:], logprobs[1:], strict=True)]
        for prompt in prompts
        for logprobs in [engine.generate([prompt], params)[0].prompt_logprobs]
    ]


def perplexity(log_probabilities: list[list[float]]) -> float:
    """Return e to the mean loss of a token."""
    return math.exp(-statistics.fmean(chain.from_iterable(log_probabilities)))


def speeds(
    runs: list[Runs], num_requests: int, num_in: int, num_out: int, num_rounds: int
) -> list[float]:
    """Return tokens a second of each, in turns: those that come out, or of prompts alone."""
    lengths = {"input_len": (num_in, num_in), "output_len": (num_out, num_out)}
    num_tokens = num_requests * (num_out if num_out > 1 else num_in)
    rates: list[list[float]] = [[] for _ in runs]
    for round_ in range(num_rounds + 1):
        items = random_tokens(num_requests, **lengths, vocab_size=40_000, seed=round_)
        for run, own in zip(runs, rates, strict=True):
            start = time.perf_counter()
            run(items)
            own.append(num_tokens / (time.perf_counter() - start))
    return [statistics.median(own[1:]) for own in rates]  # round 0 is a warm-up


if __name__ == "__main__":
    sys.exit(main())
