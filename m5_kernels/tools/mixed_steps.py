"""What a prompt costs beside decoding requests: `python -m m5_kernels.mixed_steps`

Some requests decode, and a prompt comes. Its chunk may have a step of its own, or share theirs. A
shared step is not a CUDA graph, as chunks have too many sizes, so Python launches every kernel; but
weights are read once for both, and there is one step less. Steps are waited for, not pipelined:
each time is that of a step by itself, scheduling included.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from m5_kernels import LLMEngine, SamplingParams
from milestone_llm.lab.bench.report import table
from milestone_llm.cli import Formatter, add_options, console, freeze_garbage, positive, run_command

from .gpu_command import require_driver

NUM_STEPS = 11
NUM_PROMPTS = 5


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of a decode step, by graph and without, and of each chunk alone and beside."""
    engine = LLMEngine(
        args.model or "random-qwen3-0.6b",
        max_num_seqs=args.rows + 1,
        max_model_len=max(args.context_len + 400, *(chunk + 8 for chunk in args.chunks)),
        max_num_batched_tokens=max(args.rows * args.context_len, max(args.chunks) + args.rows),
        kv_cache_tokens=args.rows * (args.context_len + 400) + 2 * max(args.chunks),
        async_scheduling=False,
        enable_prefix_caching=False,
    )
    freeze_garbage()
    alone = {chunk: prompt_ms(engine, chunk) for chunk in args.chunks}
    endless = SamplingParams(max_tokens=400, ignore_eos=True)
    for _ in range(args.rows):
        engine.add_request(random_prompt(engine, args.context_len), endless)
    step_ms(engine)  # their prompts
    decode = median_ms(engine, NUM_STEPS)
    beside = {chunk: prompt_ms(engine, chunk) for chunk in args.chunks}
    engine.release_graphs()
    eager = median_ms(engine, NUM_STEPS)
    return {"decode": decode, "eager": eager, "alone": alone, "beside": beside}


def random_prompt(engine: LLMEngine, length: int) -> list[int]:
    """Tokens of no meaning."""
    tokens: list[int] = torch.randint(3, engine.vocab_size, (length,)).tolist()
    return tokens


def step_ms(engine: LLMEngine) -> float:
    """Milliseconds of a step."""
    start = time.perf_counter()
    engine.step()  # not pipelined, so it has waited for its tokens
    return 1e3 * (time.perf_counter() - start)


def median_ms(engine: LLMEngine, num_steps: int) -> float:
    """Of some steps; the first, which may compile or capture, is not counted."""
    step_ms(engine)
    return statistics.median(step_ms(engine) for _ in range(num_steps))


def prompt_ms(engine: LLMEngine, chunk: int) -> float:
    """Milliseconds of a step that computes a whole prompt of so many tokens."""
    times = []
    for _ in range(1 + NUM_PROMPTS):  # the first may compile
        engine.add_request(random_prompt(engine, chunk), SamplingParams(max_tokens=1))
        times.append(step_ms(engine))
    return statistics.median(times[1:])


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    found = measure(args)
    decode = found["decode"]
    console.print(
        f"{args.rows} requests decode, {args.context_len} tokens each: {decode:.2f} ms a step, "
        f"without graphs {found['eager']:.2f} ms"
    )
    rows = []
    for chunk, alone in found["alone"].items():
        beside = found["beside"][chunk]
        times = (alone, beside, beside - decode, alone + decode - beside)
        rows.append([f"{chunk:,}", *(f"{ms:.2f}" for ms in times)])
    headings = ["prompt, tokens", "a step alone, ms", "a shared step", "decodes wait", "saved"]
    console.print(table("", headings, rows))


def require_model_or_gpu(args: argparse.Namespace) -> None:
    """Raise ValueError on a machine without a GPU where no small model is named."""
    if args.model is None:
        try:
            require_driver()
        except ValueError as error:
            raise ValueError(
                f"{error}; on a CPU, name a small model and small numbers: "
                "--model tiny-qwen3 --rows 2 --context-len 8 --chunks 4 16"
            ) from None


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m m5_kernels.mixed_steps", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add_options(parser, "threads")
    add("--model", help="default: Qwen3-0.6B's shape with random weights, on a GPU")
    add("--rows", type=positive, default=128, help="requests that decode")
    add("--context-len", type=positive, default=600, help="tokens of each")
    add("--chunks", type=positive, nargs="+", default=[64, 256, 1024, 4096], help="prompt lengths")
    return run_command(run, parser.parse_args(), require_model_or_gpu)


if __name__ == "__main__":
    sys.exit(main())
