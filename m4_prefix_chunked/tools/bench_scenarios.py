"""The scenarios of the bench: who competes at which work, and which ratio has to be how small."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import m3_paged
from m4_prefix_chunked.engine import LLMEngine
from milestone_llm.bench.command import make_work
from milestone_llm.bench.workloads import WorkItem
from milestone_llm.engine.outputs import RequestOutput
from milestone_llm.engine.sampling_params import SamplingParams
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.trace.records import StepRecord

from .bench_contest import Contest, Figures, LockstepContest, Target, build_engine
from .gaps import GapFigures

# --- prefix -------------------------------------------------------------------------------------


def caching_on_and_off(
    args: argparse.Namespace, loaded: LoadedModel, items: Sequence[WorkItem]
) -> dict[str, LLMEngine]:
    """Two engines that differ in `enable_prefix_caching`. Each run begins with an empty cache."""
    return {
        f"caching {name}": build_engine(args, loaded, items, enable_prefix_caching=is_on)
        for name, is_on in (("on", True), ("off", False))
    }


def m3_engine(engine: LLMEngine) -> m3_paged.LLMEngine:
    """M3 on the same model, under the same limits and with the same KV memory."""
    config = engine.config
    limits = ("max_num_seqs", "max_num_batched_tokens", "block_size")
    return m3_paged.LLMEngine(
        engine.model,
        tokenizer=engine.tokenizer,
        max_model_len=engine.max_model_len,
        kv_cache_tokens=engine.scheduler.num_blocks * config.block_size,
        **{name: getattr(config, name) for name in limits},
    )


def shared_prompt(args: argparse.Namespace, loaded: LoadedModel) -> Contest:
    """Requests with one system prompt, eight steps apart, so that hardly anybody queues."""
    rng = random.Random(args.seed)
    vocab_size = loaded.model.config.get_text_config().vocab_size

    def tokens(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    system_prompt = tokens(args.system_prompt_tokens)
    items = [
        WorkItem([*system_prompt, *tokens(rng.randint(16, 32))], exactly(32), arrival_step=8 * i)
        for i in range(args.num_requests or 8)
    ]

    def figures(outputs: Sequence[RequestOutput], records: Sequence[StepRecord]) -> Figures:
        ttft = [1e3 * (output.metrics.ttft or 0.0) for output in outputs]
        saved = sum(output.metrics.num_cached_tokens for output in outputs)
        return {
            "ttft_first": ttft[0],
            "ttft_later": statistics.median(ttft[1:] or ttft),
            "saved_tokens": saved,
        }

    return Contest(
        title=f"shared: {len(items)} requests with {len(system_prompt)} prompt tokens in common",
        loaded=loaded,
        engines=caching_on_and_off(args, loaded, items),
        items=items,
        figures=figures,
        columns={
            "ttft_first": "TTFT of\nthe first",
            "ttft_later": "TTFT of\nthe later",
            "saved_tokens": "prompt tokens\nsaved",
            "seconds": "seconds",
        },
        targets=[
            Target("TTFT of the later requests", "ttft_later", "caching on", "caching off", 0.25),
            Target("time for all", "seconds", "caching on", "caching off"),
            Target(
                "TTFT of the first request",
                "ttft_first",
                "caching on",
                "caching off",
                loses="who comes first pays for the others and gains nothing",
            ),
        ],
        seed=args.seed,
    )


def nothing_shared(args: argparse.Namespace, loaded: LoadedModel) -> Contest:
    """The chosen workload, in which no prompt begins like another; with M3, which has no cache."""
    items = make_work(args, loaded.model.config.get_text_config().vocab_size)
    engines: dict[str, Any] = dict(caching_on_and_off(args, loaded, items))
    engines["m3_paged"] = m3_engine(engines["caching off"])

    def figures(outputs: Sequence[RequestOutput], records: Sequence[StepRecord]) -> Figures:
        steps = [record.schedule_ms + record.update_ms for record in records]
        saved = sum(output.metrics.num_cached_tokens for output in outputs)
        return {"bookkeeping": statistics.fmean(steps), "saved_tokens": saved}

    return LockstepContest(
        title=f"nothing shared: {args.workload}, {len(items)} requests, 0 % hits",
        loaded=loaded,
        engines=engines,
        items=items,
        figures=figures,
        columns={
            "tok_s": "tok/s",
            "seconds": "seconds",
            "step_p50": "a step,\np50",
            "bookkeeping": "schedule +\nupdate a step",
            "saved_tokens": "prompt tokens\nsaved",
        },
        targets=[
            Target(
                "time for all",
                "seconds",
                "caching on",
                "caching off",
                1.02,
                loses="hashes and lookups cost time, and here nothing comes of them",
            ),
            Target("a step, p50", "step_p50", "caching on", "caching off"),
            Target("schedule + update", "bookkeeping", "caching on", "caching off"),
            Target("time for all", "seconds", "caching on", "m3_paged"),
            Target("a step, p50", "step_p50", "caching on", "m3_paged"),
        ],
        seed=args.seed,
    )


# --- stall --------------------------------------------------------------------------------------


def long_arrival(args: argparse.Namespace, loaded: LoadedModel) -> Contest:
    """Requests that decode, and a long prompt that comes after sixteen steps."""
    rng = random.Random(args.seed)
    vocab_size = loaded.model.config.get_text_config().vocab_size
    num_victims = (args.num_requests or 9) - 1
    if num_victims < 1:
        raise ValueError("--scenario stall needs at least 2 requests: one that waits for another")
    lengths = [rng.randint(16, 32) for _ in range(num_victims)] + [args.long_prompt_tokens]
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]
    items = [WorkItem(prompt, exactly(64)) for prompt in prompts]
    items[-1] = replace(items[-1], params=exactly(16), arrival_step=16)
    whole = max(args.max_num_batched_tokens, args.long_prompt_tokens + num_victims)
    mixed, large = f"mixed, {args.chunk_tokens}", f"mixed, {whole:,}"
    settings = {
        mixed: ("mixed", args.chunk_tokens),
        "prefill_first": ("prefill_first", whole),
        large: ("mixed", whole),
    }

    def figures(outputs: Sequence[RequestOutput], records: Sequence[StepRecord]) -> Figures:
        gaps = GapFigures.of(outputs[:num_victims])
        return {
            "gap_p50": 1e3 * gaps.p50,
            "gap_p99": 1e3 * gaps.p99,
            "gap_max": 1e3 * gaps.longest,
            "ttft_long": 1e3 * (outputs[-1].metrics.ttft or 0.0),
        }

    return Contest(
        title=f"stall: {len(prompts[-1]):,} prompt tokens come to {num_victims} running requests",
        loaded=loaded,
        engines={
            name: build_engine(
                args,
                loaded,
                items,
                prefill_policy=policy,
                max_num_batched_tokens=budget,
                enable_prefix_caching=False,
            )
            for name, (policy, budget) in settings.items()
        },
        items=items,
        figures=figures,
        columns={
            "gap_p50": "gap\np50",
            "gap_p99": "gap\np99",
            "gap_max": "gap\nmax",
            "ttft_long": "TTFT of\nthe long one",
            "seconds": "seconds",
        },
        targets=[
            Target("p99 gap of the running requests", "gap_p99", mixed, "prefill_first", 0.35),
            Target(
                "time for all",
                "seconds",
                mixed,
                "prefill_first",
                1.1,
                loses="each chunk reads all weights and the KV of all chunks before it again",
            ),
            Target(
                "TTFT of the long prompt",
                "ttft_long",
                mixed,
                "prefill_first",
                loses="it shares its steps with others",
            ),
            Target("p99 gap with a budget for all of it", "gap_p99", large, "prefill_first"),
        ],
        seed=args.seed,
    )


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy, and so many tokens whatever comes."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


SCENARIOS: dict[str, Sequence[Callable[[argparse.Namespace, LoadedModel], Contest]]] = {
    "prefix": (shared_prompt, nothing_shared),
    "stall": (long_arrival,),
}
