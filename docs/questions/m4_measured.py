"""What do caching and chunking buy, and where do they lose? `python -m docs.questions.m4_measured`

  prefix   eight requests with one system prompt, caching on and off; and requests with nothing in
           common, to see what looking into the cache costs, beside M3
  stall    a long prompt comes while others decode, under both prefill policies

Contestants take turns in every round. Ratios are those of rounds, and their median counts.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from milestone_llm.command.cli import positive
from milestone_llm.core.errors import InputError
from milestone_llm.core.sampling_params import SamplingParams
from milestone_llm.lab.bench.command import bench_command
from milestone_llm.lab.bench.report import Tables
from milestone_llm.lab.bench.workloads import WorkItem

if TYPE_CHECKING:
    from milestone_llm.frontend.outputs import RequestOutput
    from milestone_llm.lab.bench.compare import Bench
    from milestone_llm.trace.records import StepRecord

Figures = dict[str, float]
ON, OFF = "caching on", "caching off"


def prefix(bench: Bench) -> None:
    """Prefix caching on and off."""
    shared_prompt(bench)
    nothing_shared(bench)


def shared_prompt(bench: Bench) -> None:
    """Requests with one system prompt, eight steps apart, so that hardly anybody queues."""
    rng = random.Random(bench.args.seed)
    tokens = partial(random_tokens, rng, bench.loaded.vocab_size)
    system_prompt = tokens(bench.args.system_prompt_tokens)
    items = [
        WorkItem(system_prompt + tokens(rng.randint(16, 32)), exactly(32), arrival_step=8 * i)
        for i in range(bench.args.num_requests or 8)
    ]

    def facts(outputs: Sequence[RequestOutput], records: Sequence[StepRecord]) -> Figures:
        ttft = [1e3 * (output.metrics.ttft or 0.0) for output in outputs]
        later = statistics.median(ttft[1:] or ttft)
        return {"ttft_first": ttft[0], "ttft_later": later, "saved_tokens": num_saved(outputs)}

    def remarks(data: dict[str, Any]) -> list[str]:
        loss = "who comes first pays for the others and gains nothing"
        return [
            *ratio(data, "TTFT of the later requests", "ttft_later", ON, OFF, at_most=0.25),
            *ratio(data, "time for all", "seconds", ON, OFF),
            *ratio(data, "TTFT of the first request", "ttft_first", ON, OFF, loses=loss),
        ]

    columns = times(
        ttft_first="TTFT of\nthe first",
        ttft_later="TTFT of\nthe later",
        saved_tokens="prompt tokens\nsaved",
    )
    title = f"shared: {len(system_prompt)} prompt tokens in common"
    engines = caching_on_and_off(bench, items)
    bench.compare(title, items, engines, tables=columns, remarks=remarks, facts=facts)


def nothing_shared(bench: Bench) -> None:
    """The chosen workload, in which no prompt begins like another; with M3, which has no cache."""
    items = bench.make_work()
    engines = caching_on_and_off(bench, items)
    engines["m3_paged"] = bench.engine(items, "m3_paged")

    def facts(outputs: Sequence[RequestOutput], records: Sequence[StepRecord]) -> Figures:
        bookkeeping = [record.schedule_ms + record.update_ms for record in records]
        whole = [ms + record.execute_ms for ms, record in zip(bookkeeping, records, strict=True)]
        return {
            "step_p50": statistics.median(whole),
            "bookkeeping": statistics.fmean(bookkeeping),
            "saved_tokens": num_saved(outputs),
        }

    def remarks(data: dict[str, Any]) -> list[str]:
        loss = "hashes and lookups cost time, and here nothing comes of them"
        return [
            *ratio(data, "time for all", "seconds", ON, OFF, at_most=1.02, loses=loss),
            *ratio(data, "a step, p50", "step_p50", ON, OFF),
            *ratio(data, "schedule + update", "bookkeeping", ON, OFF),
            *ratio(data, "time for all", "seconds", ON, "m3_paged"),
            *ratio(data, "a step, p50", "step_p50", ON, "m3_paged"),
        ]

    columns = times(
        tok_s="tok/s",
        step_p50="a step,\np50",
        bookkeeping="schedule +\nupdate a step",
        saved_tokens="prompt tokens\nsaved",
    )
    title = f"nothing shared: {bench.args.workload}, 0 % hits"
    bench.compare(title, items, engines, tables=columns, remarks=remarks, facts=facts)


def stall(bench: Bench) -> None:
    """A long prompt comes while others decode."""
    args = bench.args
    num_running = (args.num_requests or 9) - 1
    if num_running < 1:
        raise InputError("stall needs at least 2 requests: one that waits for another")
    rng = random.Random(args.seed)
    lengths = [*(rng.randint(16, 32) for _ in range(num_running)), args.long_prompt_tokens]
    items = [WorkItem(random_tokens(rng, bench.loaded.vocab_size, n), exactly(64)) for n in lengths]
    items[-1] = replace(items[-1], params=exactly(16), arrival_step=16)
    whole = max(args.max_num_batched_tokens, args.long_prompt_tokens + num_running)
    mixed, first, large = f"mixed, {args.chunk_tokens}", "prefill_first", f"mixed, {whole:,}"
    engines = {
        name: bench.engine(
            items,
            prefill_policy=policy,
            max_num_batched_tokens=budget,
            enable_prefix_caching=False,
        )
        for name, policy, budget in (
            (mixed, "mixed", args.chunk_tokens),
            (first, "prefill_first", whole),
            (large, "mixed", whole),
        )
    }

    def facts(outputs: Sequence[RequestOutput], records: Sequence[StepRecord]) -> Figures:
        from milestone_llm.lab.bench.measure import gap_figures

        ttft_long = 1e3 * (outputs[-1].metrics.ttft or 0.0)
        return {**gap_figures(outputs[:num_running]), "ttft_long": ttft_long}

    def remarks(data: dict[str, Any]) -> list[str]:
        loss = "each chunk reads all weights and the KV of all chunks before it again"
        late = "it shares its steps with others"
        return [
            *ratio(data, "p99 gap of the running requests", "gap_p99", mixed, first, at_most=0.35),
            *ratio(data, "time for all", "seconds", mixed, first, at_most=1.1, loses=loss),
            *ratio(data, "TTFT of the long prompt", "ttft_long", mixed, first, loses=late),
            *ratio(data, "p99 gap with a budget for all of it", "gap_p99", large, first),
        ]

    columns = times(
        gap_p50="gap\np50",
        gap_p99="gap\np99",
        gap_max="gap\nmax",
        ttft_long="TTFT of\nthe long one",
    )
    title = f"stall: {args.long_prompt_tokens:,} prompt tokens come to {num_running} running"
    bench.compare(title, items, engines, tables=columns, remarks=remarks, facts=facts)


def ratio(
    data: Mapping[str, Any],
    meaning: str,
    figure: str,
    ours: str,
    theirs: str,
    at_most: float | None = None,
    loses: str = "",
) -> list[str]:
    """A figure of one contestant divided by another's, in words: the median over the rounds.

    Args:
        at_most: how large this project wants it at most.
        loses: what to say where it is above 1.02: an optimisation that costs something.
    """
    pairs = zip(*(data["contestants"][name]["rounds"] for name in (ours, theirs)), strict=True)
    rounds = [own[figure] / its[figure] for own, its in pairs]
    median = statistics.median(rounds)
    spread = f" ({min(rounds):.3f}..{max(rounds):.3f})" if len(rounds) > 1 else ""
    line = f"{meaning}, {ours} against {theirs}: {median:.3f}x{spread}"
    if at_most is not None:
        verdict = "met" if median <= at_most else "MISSED"
        line += f"; our target, at most {at_most:g}x: {verdict}"
    is_steady = len(rounds) > 1 and min(rounds) > 1  # and not one slow round of the machine
    has_lost = loses and is_steady and median > 1.02
    return [line, f"{ours} loses there: {loses}"] if has_lost else [line]


def caching_on_and_off(bench: Bench, items: Sequence[WorkItem]) -> dict[str, Any]:
    """Two engines that differ in `enable_prefix_caching`. Each run begins with an empty cache."""
    switches = {ON: True, OFF: False}
    return {name: bench.engine(items, enable_prefix_caching=on) for name, on in switches.items()}


def times(**columns: str) -> Tables:
    """One table; keywords are figures and their headings."""
    named = {heading: f"{{{figure}}}" for figure, heading in columns.items()}
    return {"Times in ms{of_rounds}": {**named, "seconds": "{seconds:.2f}"}}


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy, and so many tokens whatever comes."""
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)


def random_tokens(rng: random.Random, vocab_size: int, count: int) -> list[int]:
    """A prompt."""
    return [rng.randrange(vocab_size) for _ in range(count)]


def num_saved(outputs: Sequence[RequestOutput]) -> int:
    """Prompt tokens that were found in the cache."""
    return sum(output.metrics.num_cached_tokens for output in outputs)


def run(bench: Bench) -> None:
    """What the command line asks for."""
    if bench.args.baseline:
        raise InputError("--baseline goes with the benches of the milestones")
    {"prefix": prefix, "stall": stall}[bench.args.what](bench)


def options(parser: argparse.ArgumentParser) -> None:
    """What the two need."""
    parser.set_defaults(rounds=3)
    parser.add_argument("what", choices=("prefix", "stall"))
    add = parser.add_argument_group("prompts").add_argument
    add("--system-prompt-tokens", type=positive, default=512, help="what prompts have in common")
    add("--long-prompt-tokens", type=positive, default=1500, help="of the one that comes later")
    add("--chunk-tokens", type=positive, default=256, help="budget of a step that cuts it")


PROGRAM = "docs.questions.m4_measured"
main = partial(bench_command, "m4_prefix_chunked", __doc__, run=run, prog=PROGRAM, options=options)

if __name__ == "__main__":
    sys.exit(main())
