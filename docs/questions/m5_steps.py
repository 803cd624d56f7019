"""How long a decode step takes, and what a prompt costs beside it.

    python -m docs.questions.m5_steps                                  decode steps
    python -m docs.questions.m5_steps --rows 128 --chunks 64 1024      prompts beside them

Steps are waited for, not pipelined: "a step" is one by itself, scheduling included. "Its graph" is
what the GPU does in it - metadata, layers, LM head, sampling, append - replayed without an engine
around it, and rated against reading the weights and the KV once.

With --chunks a prompt comes while the rows decode. Its chunk may have a step of its own, or share
theirs: weights are read once for both then. A shared step is launched kernel by kernel, or replays
the graph of its bucket, which is padded to as many tokens as the bucket has; beyond the largest
bucket there is none. "Wait" is what the decode rows get to feel of the prompt.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from typing import Any

import torch

from m5_kernels import LLMEngine, SamplingParams
from m5_kernels.sampler import Needs
from m5_kernels.step_graphs import StepShape
from m5_kernels.tools.bench_limits import RunLimit
from m5_kernels.tools.measure import Ceilings
from milestone_llm.command.cli import Formatter, add_options, console, positive, run_command
from milestone_llm.core.errors import InputError
from milestone_llm.frontend.garbage import freeze_garbage
from milestone_llm.lab.bench.report import table
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.models.checkpoint import load_model

NUM_STEPS, NUM_PROMPTS, NUM_REPLAYS = 11, 5, 10
HEADROOM = 400
"""Tokens that a row may get while it is measured."""


def measure_steps(args: argparse.Namespace) -> None:
    """Print the tables.

    Raises:
        InputError: no model is named, and there is no GPU for the default one.
    """
    on_gpu = torch.cuda.is_available()
    if args.model is None and not on_gpu:
        raise InputError(
            "this measures steps on an NVIDIA GPU, and torch sees none here; on a CPU, name a "
            "small model and small numbers: "
            "--model tiny-qwen3 --rows 2 --context-len 8 --chunks 4 16"
        )
    engine = build_engine(args)
    ceilings = Ceilings.measure() if on_gpu else None
    if ceilings:
        console.print(str(ceilings), soft_wrap=True)
    alone = {chunk: prompt_ms(engine, chunk) for chunk in args.chunks}
    rows: list[list[str]] = []
    for num_rows in sorted(args.rows):
        decode_with(engine, num_rows, args.context_len)
        decode = median_ms(engine)
        rows.append([str(num_rows), f"{decode:.3f}"])
        if ceilings:
            rows[-1] += graph_cells(engine, num_rows, args.context_len, ceilings)
    headings = ["rows", "a step, ms", "its graph, ms", "tok/s", "reads alone, ms", "share"]
    console.print(f"Decode steps, {args.context_len} tokens a row")
    console.print(table("", headings[: len(rows[0])], rows))
    if args.chunks:
        buckets = {chunk: bucket_of(engine, num_rows, chunk) for chunk in args.chunks}
        shared = {chunk: prompt_ms(engine, chunk) for chunk in args.chunks}
        engine.runner.graphs = None
        launched = {chunk: prompt_ms(engine, chunk) for chunk in args.chunks}
        console.print(
            f"\n{num_rows} requests decode, {args.context_len} tokens each: {decode:.2f} ms a "
            f"step, launched kernel by kernel {median_ms(engine):.2f} ms"
        )
        rows = []
        for chunk in args.chunks:
            times = (alone[chunk], launched[chunk], shared[chunk], shared[chunk] - decode)
            rows.append([f"{chunk:,}", buckets[chunk], *(f"{ms:.2f}" for ms in times)])
        headings = ["prompt, tokens", "bucket", "alone, ms", "shared, launched", "shared", "wait"]
        console.print(table("", headings, rows))


def build_engine(args: argparse.Namespace) -> Any:
    """An engine with room for all rows, and for a prompt beside them."""
    most, longest = max(args.rows), max(args.chunks, default=0)
    engine = LLMEngine(
        load_model(args.model or "random-qwen3-0.6b").model,
        max_num_seqs=most + 1,
        max_model_len=max(args.context_len + HEADROOM, longest + 8),
        max_num_batched_tokens=max(most * args.context_len, longest + most),
        kv_cache_tokens=most * (args.context_len + HEADROOM) + 2 * longest,
        async_scheduling=False,
        enable_prefix_caching=False,
    )
    freeze_garbage()
    return engine


def decode_with(engine: Any, num_rows: int, context_len: int) -> None:
    """Add requests until so many decode."""
    params = SamplingParams(max_tokens=HEADROOM, temperature=0.6, ignore_eos=True)
    for _ in range(len(engine.requests), num_rows):
        engine.add_request(random_prompt(engine, context_len), params)
    step_ms(engine)  # their prompts


def graph_cells(engine: Any, num_rows: int, context_len: int, ceilings: Ceilings) -> list[str]:
    """The decode graph of the requests that run, beside reading what it has to read."""
    item = WorkItem([0] * (context_len - 1), SamplingParams(max_tokens=2))  # and one is decoded
    best = RunLimit.of(engine.model, [item] * num_rows, num_steps=1).seconds(ceilings)
    graph_ms, best_ms = replay_ms(engine, num_rows), 1e3 * (best["weights"] + best["kv"])
    cells = [f"{graph_ms:.3f}", f"{1e3 * num_rows / graph_ms:,.0f}"]
    return [*cells, f"{best_ms:.3f}", f"{best_ms / graph_ms:.0%}"]


def bucket_of(engine: Any, num_rows: int, chunk: int) -> str:
    """Tokens of the graph that a step of these rows and a prompt replays."""
    shape = StepShape(num_rows + chunk, num_rows + 1, num_rows, 1)
    bucket = engine.runner.graphs and engine.runner.buckets.bucket_for(shape)
    return f"{bucket.num_tokens:,}" if bucket else "-"


def random_prompt(engine: Any, length: int) -> list[int]:
    """Tokens of no meaning."""
    tokens: list[int] = torch.randint(3, engine.vocab_size, (length,)).tolist()
    return tokens


def step_ms(engine: Any) -> float:
    """Milliseconds of a step."""
    start = time.perf_counter()
    engine.step()  # not pipelined, so it has waited for its tokens
    return 1e3 * (time.perf_counter() - start)


def median_ms(engine: Any) -> float:
    """Of some steps; the first, which may compile or capture, is not counted."""
    step_ms(engine)
    return statistics.median(step_ms(engine) for _ in range(NUM_STEPS))


def prompt_ms(engine: Any, chunk: int) -> float:
    """Milliseconds of a step that computes a whole prompt of so many tokens."""
    times = []
    for _ in range(1 + NUM_PROMPTS):  # the first may compile
        engine.add_request(random_prompt(engine, chunk), SamplingParams(max_tokens=1))
        times.append(step_ms(engine))
    return statistics.median(times[1:])


@torch.inference_mode()
def replay_ms(engine: Any, num_rows: int) -> float:
    """Milliseconds of the decode graph of the requests that run, one replay after the other.

    A replay appends a token to every row on the device, unknown to the host: lengths are set back.
    """
    lengths, graphs = engine.runner.state.rows.num_computed_tokens, engine.runner.graphs
    bucket = engine.runner.buckets.bucket_for(StepShape(num_rows, num_rows, num_rows, 0))
    before = lengths.clone()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(7):
        for index in range(2 + NUM_REPLAYS):
            if index == 2:  # from here on the GPU has something to do while Python launches
                start.record()
            graphs.replay(bucket, Needs())
        end.record()
        end.synchronize()
        assert not torch.equal(lengths, before), "the step appended no token"
        lengths.copy_(before)
        times.append(start.elapsed_time(end) / NUM_REPLAYS)
    return statistics.median(times)


def main() -> int:
    """The command line. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.questions.m5_steps", description=__doc__, formatter_class=Formatter
    )
    add = parser.add_argument
    add_options(parser, "threads")
    add("--model", help="default: Qwen3-0.6B's shape with random weights, on a GPU")
    rows = [1, 8, 32, 64, 128, 256]
    add("--rows", type=positive, nargs="+", default=rows, help="requests that decode")
    add("--context-len", type=positive, default=600, help="tokens of each")
    add("--chunks", type=positive, nargs="+", default=[], help="lengths of prompts beside them")
    return run_command(measure_steps, parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
