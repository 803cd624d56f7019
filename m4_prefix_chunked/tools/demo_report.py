"""The demo's tables: what the cache saved, and how long running requests paused."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from m4_prefix_chunked.engine import LLMEngine
from milestone_llm.cli import console
from milestone_llm.demo.kit import DemoRun, milliseconds
from milestone_llm.trace.console import ConsoleSink
from milestone_llm.trace.records import StepRecord

from .demo_work import LongPromptWork
from .gaps import GapFigures


def print_savings(runs: Sequence[DemoRun]) -> None:
    """Per request: tokens that the cache saved, and its TTFT with and without."""
    headline("Tokens saved by the cache; TTFT in ms since each one's arrival")
    table = Table(box=None, header_style="bold")
    for name in ("request", "in", "saved", "TTFT cached", "TTFT not cached", "share of it"):
        table.add_column(name, justify="left" if name == "request" else "right", no_wrap=True)
    for output, other in zip(*(run.outputs for run in runs), strict=True):
        ttft, plain = output.metrics.ttft, other.metrics.ttft
        share = f"{ttft / plain:.0%}" if ttft and plain else "-"
        table.add_row(
            output.request_id,
            str(len(output.prompt_token_ids)),
            str(output.metrics.num_cached_tokens or "-"),
            milliseconds(ttft),
            milliseconds(plain),
            share,
        )
    console.print(table)


def print_cache_counts(engine: LLMEngine) -> None:
    """What the cache counted."""
    counts = engine.stats()["prefix_cache"]
    console.print(
        f"\nprefix cache: {counts['hits']} of {counts['queries']} requests hit, "
        f"{counts['saved_tokens']:,} of {counts['queried_tokens']:,} prompt tokens saved "
        f"({counts['hit_rate']:.1%}), {counts['evictions']} evictions"
    )


def print_gaps(runs: Sequence[DemoRun], work: LongPromptWork) -> None:
    """How long the running requests waited from one token to the next."""
    headline(f"The {work.num_victims} running requests: ms from one token to the next")
    table = Table(box=None, header_style="bold")
    table.add_column("policy")
    for name in ("p50", "p99", "max", f"TTFT of r{work.num_victims}"):
        table.add_column(name, justify="right")
    for run in runs:
        gaps = GapFigures.of(run.outputs[: work.num_victims])
        numbers = (gaps.p50, gaps.p99, gaps.longest, run.outputs[work.num_victims].metrics.ttft)
        table.add_row(run.label, *map(milliseconds, numbers))
    console.print(table)
    console.print(
        f"\nThe prompt of r{work.num_victims} has {work.num_long_tokens:,} tokens, a step at most "
        f"{work.budget}. Chunks in mixed steps spare the others the pause; the long prompt itself "
        "gets its first token a little later for it."
    )


def show_step(record: StepRecord, what: str) -> None:
    """One step as the console trace shows it."""
    headline(f"{what} (step {record.step})")
    ConsoleSink(console)(record)


def print_same_tokens(runs: Sequence[DemoRun]) -> None:
    """Whether the runs agree, as they should."""
    tokens = [[output.token_ids for output in run.outputs] for run in runs]
    if all(each == tokens[0] for each in tokens):
        console.print("\nBoth runs gave the same tokens.")


def headline(text: str) -> None:
    """What the next lines are about."""
    console.print()
    console.rule(f"[bold]{text}", align="left", style="dim")
