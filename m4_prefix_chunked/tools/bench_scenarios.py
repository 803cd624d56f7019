"""The scenarios of the bench: who competes at which work, and which ratio has to be how small."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import m3_paged
from m4_prefix_chunked.engine import LLMEngine
from milestone_llm.lab.bench.command import Bench
from milestone_llm.lab.bench.contest import Contest, Tables, Target
from milestone_llm.lab.bench.measure import Contestant, FactMaker, Figures, engine_contestant
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.trace.records import StepRecord

from .bench_by_steps import measure_by_steps
from .gaps import GapFigures

SECONDS = {"seconds": "{seconds:.2f}"}


def tables(**columns: str) -> Tables:
    """One table; keywords are figures and their headings."""
    named = {heading: f"{{{figure}}}" for figure, heading in columns.items()}
    return {"Times in ms{of_rounds}": {**named, **SECONDS}}


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy, and so many tokens whatever comes."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def caching_on_and_off(
    bench: Bench, items: Sequence[WorkItem], facts: FactMaker
) -> list[Contestant]:
    """Two engines that differ in `enable_prefix_caching`. Each run begins with an empty cache."""
    return [
        engine_contestant(bench.engine(items, enable_prefix_caching=is_on), name, facts)
        for name, is_on in (("caching on", True), ("caching off", False))
    ]


def m3_contestant(engine: LLMEngine, facts: FactMaker | None = None) -> Contestant:
    """M3 on the same model, under the same limits and with the same KV memory."""
    config = engine.config
    limits = ("max_num_seqs", "max_num_batched_tokens", "block_size")
    m3_engine = m3_paged.LLMEngine(
        engine.model,
        tokenizer=engine.tokenizer,
        max_model_len=engine.max_model_len,
        kv_cache_tokens=engine.scheduler.num_blocks * config.block_size,
        **{name: getattr(config, name) for name in limits},
    )
    return engine_contestant(m3_engine, facts=facts)


def num_saved(outputs: Sequence[RequestOutput]) -> int:
    """Prompt tokens that were found in the cache."""
    return sum(output.metrics.num_cached_tokens for output in outputs)


def shared_prompt(bench: Bench) -> None:
    """Requests with one system prompt, eight steps apart, so that hardly anybody queues."""
    rng = random.Random(bench.args.seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(bench.vocab_size) for _ in range(count)]

    system_prompt = tokens(bench.args.system_prompt_tokens)
    items = [
        WorkItem([*system_prompt, *tokens(rng.randint(16, 32))], exactly(32), arrival_step=8 * i)
        for i in range(bench.args.num_requests or 8)
    ]

    def facts(outputs: Sequence[RequestOutput], records: Sequence[StepRecord]) -> Figures:
        ttft = [1e3 * (output.metrics.ttft or 0.0) for output in outputs]
        return {
            "ttft_first": ttft[0],
            "ttft_later": statistics.median(ttft[1:] or ttft),
            "saved_tokens": num_saved(outputs),
        }

    pair = ("caching on", "caching off")
    loss = "who comes first pays for the others and gains nothing"
    bench.run(
        Contest(
            f"shared: {len(system_prompt)} prompt tokens in common",
            items,
            caching_on_and_off(bench, items, facts),
            tables(
                ttft_first="TTFT of\nthe first",
                ttft_later="TTFT of\nthe later",
                saved_tokens="prompt tokens\nsaved",
            ),
            targets=[
                Target("TTFT of the later requests", "ttft_later", *pair, at_most=0.25),
                Target("time for all", "seconds", *pair),
                Target("TTFT of the first request", "ttft_first", *pair, loses=loss),
            ],
        )
    )


def nothing_shared(bench: Bench) -> None:
    """The chosen workload, in which no prompt begins like another; with M3, which has no cache."""
    items = bench.make_work()

    def facts(outputs: Sequence[Any], records: Sequence[StepRecord]) -> Figures:
        steps = [record.schedule_ms + record.update_ms for record in records]
        return {"bookkeeping": statistics.fmean(steps), "saved_tokens": num_saved(outputs)}

    contestants = caching_on_and_off(bench, items, facts)
    contestants.append(m3_contestant(contestants[-1].engine, facts))
    pair = ("caching on", "caching off")
    loss = "hashes and lookups cost time, and here nothing comes of them"
    bench.run(
        Contest(
            f"nothing shared: {bench.args.workload}, 0 % hits",
            items,
            contestants,
            tables(
                tok_s="tok/s",
                step_p50="a step,\np50",
                bookkeeping="schedule +\nupdate a step",
                saved_tokens="prompt tokens\nsaved",
            ),
            targets=[
                Target("time for all", "seconds", *pair, at_most=1.02, loses=loss),
                Target("a step, p50", "step_p50", *pair),
                Target("schedule + update", "bookkeeping", *pair),
                Target("time for all", "seconds", "caching on", "m3_paged"),
                Target("a step, p50", "step_p50", "caching on", "m3_paged"),
            ],
            measure=measure_by_steps,
        )
    )


def long_arrival(bench: Bench) -> None:
    """Requests that decode, and a long prompt that comes after sixteen steps.

    Raises:
        ValueError: there is nobody to wait for the long prompt.
    """
    args = bench.args
    rng = random.Random(args.seed)
    num_victims = (args.num_requests or 9) - 1
    if num_victims < 1:
        raise ValueError("--scenario stall needs at least 2 requests: one that waits for another")
    lengths = [rng.randint(16, 32) for _ in range(num_victims)] + [args.long_prompt_tokens]
    prompts = [[rng.randrange(bench.vocab_size) for _ in range(length)] for length in lengths]
    items = [WorkItem(prompt, exactly(64)) for prompt in prompts]
    items[-1] = replace(items[-1], params=exactly(16), arrival_step=16)
    whole = max(args.max_num_batched_tokens, args.long_prompt_tokens + num_victims)
    mixed, large = f"mixed, {args.chunk_tokens}", f"mixed, {whole:,}"

    def facts(outputs: Sequence[RequestOutput], records: Sequence[StepRecord]) -> Figures:
        gaps = GapFigures.of(outputs[:num_victims])
        return {
            "gap_p50": 1e3 * gaps.p50,
            "gap_p99": 1e3 * gaps.p99,
            "gap_max": 1e3 * gaps.longest,
            "ttft_long": 1e3 * (outputs[-1].metrics.ttft or 0.0),
        }

    contestants = [
        engine_contestant(
            bench.engine(
                items,
                prefill_policy=policy,
                max_num_batched_tokens=budget,
                enable_prefix_caching=False,
            ),
            name,
            facts,
        )
        for name, policy, budget in (
            (mixed, "mixed", args.chunk_tokens),
            ("prefill_first", "prefill_first", whole),
            (large, "mixed", whole),
        )
    ]
    pair = (mixed, "prefill_first")
    loss = "each chunk reads all weights and the KV of all chunks before it again"
    late = "it shares its steps with others"
    bench.run(
        Contest(
            f"stall: {args.long_prompt_tokens:,} prompt tokens come to {num_victims} running",
            items,
            contestants,
            tables(
                gap_p50="gap\np50",
                gap_p99="gap\np99",
                gap_max="gap\nmax",
                ttft_long="TTFT of\nthe long one",
            ),
            targets=[
                Target("p99 gap of the running requests", "gap_p99", *pair, at_most=0.35),
                Target("time for all", "seconds", *pair, at_most=1.1, loses=loss),
                Target("TTFT of the long prompt", "ttft_long", *pair, loses=late),
                Target("p99 gap with a budget for all of it", "gap_p99", large, "prefill_first"),
            ],
        )
    )
