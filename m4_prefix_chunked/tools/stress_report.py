"""What a stress run has to say for itself: speed, evenness, memory, and blocks that came back."""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from m4_prefix_chunked.engine import LLMEngine
from milestone_llm.bench.measure import percentile
from milestone_llm.bench.report import environment
from milestone_llm.cli import console
from milestone_llm.engine.outputs import RequestOutput

WARM_UP_SHARE = 0.2
"""The first steps fill allocators and caches: growth is counted from there on."""
_MB = 2**20


def resident_bytes() -> int:
    """Physical memory of this process; where the system does not tell, the most it ever had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        import resource

        return int(statm.read_text().split()[1]) * resource.getpagesize()
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True, slots=True)
class Sample:
    """The engine after one step. Blocks and requests are counts."""

    time: float
    step_ms: float
    resident: int
    running: int
    waiting: int
    used_blocks: int
    cached_blocks: int
    """Free, but they can be found."""
    preemptions: int
    """Since the start."""

    @classmethod
    def of(cls, engine: LLMEngine, start: float) -> Sample:
        """Taken now, of a step that began at `start` (seconds of `time.perf_counter()`)."""
        now, scheduler = time.perf_counter(), engine.scheduler
        return cls(
            time=now,
            step_ms=(now - start) * 1e3,
            resident=resident_bytes(),
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            used_blocks=scheduler.kv.pool.num_used,
            cached_blocks=scheduler.kv.pool.num_cached_free,
            preemptions=scheduler.num_preemptions,
        )


@dataclass
class MemoryTrend:
    """Process memory after the warm-up, in bytes."""

    first: float
    last: float
    growth_per_step: float
    jitter: float
    """Standard deviation from the straight line."""

    @property
    def growth(self) -> float:
        """From the end of the warm-up to the end of the run."""
        return self.last - self.first

    @classmethod
    def of(cls, resident: list[int]) -> MemoryTrend:
        """Fit a straight line, least squares, to the samples after the warm-up."""
        kept = resident[int(len(resident) * WARM_UP_SHARE) :] or [0]
        steps = range(len(kept))
        slope, start = (0.0, float(kept[0]))
        if len(kept) > 1:
            slope, start = statistics.linear_regression(steps, kept)
        off = [value - (start + slope * step) for step, value in zip(steps, kept, strict=True)]
        return cls(start, start + slope * (len(kept) - 1), slope, statistics.pstdev(off))


@dataclass
class StressReport:
    """Collects while the traffic runs; `close` looks at what is left in the engine."""

    engine: LLMEngine
    num_requests: int
    samples: list[Sample] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    # Arrays, not lists: what the report itself keeps should not look like growth of the engine.
    ttft: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    num_output_tokens: int = 0
    num_cached_requests: int = 0
    broken: str = ""
    """The step and the invariant that did not hold in it."""
    blocks_lost: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self._start = time.perf_counter()

    @property
    def num_ended(self) -> int:
        """Requests that have ended, for whatever reason."""
        return sum(self.reasons.values())

    @property
    def is_good(self) -> bool:
        """Every block came back, every request ended, none in an error, all invariants held."""
        is_complete = self.num_ended == self.num_requests and not self.reasons["error"]
        return is_complete and not self.blocks_lost and not self.broken

    def add(self, output: RequestOutput) -> None:
        """Take the figures of a request that has ended."""
        self.reasons[str(output.outputs[0].finish_reason)] += 1
        self.num_output_tokens += sum(len(each.token_ids) for each in output.outputs)
        self.num_cached_requests += output.metrics.num_cached_tokens > 0
        if output.metrics.ttft is not None:
            self.ttft.append(output.metrics.ttft)
        times = output.metrics.token_times
        self.gaps.extend(after - before for before, after in pairwise(times))

    def close(self) -> None:
        """The run is over: count what did not come back."""
        self.seconds = time.perf_counter() - self._start
        scheduler = self.engine.scheduler
        unfinished = len(scheduler.running) + len(scheduler.waiting)
        if not unfinished:
            self.blocks_lost = scheduler.kv.pool.num_used + scheduler.host.pool.num_used
        self.memory = MemoryTrend.of([sample.resident for sample in self.samples])

    def as_data(self) -> dict[str, Any]:
        """Everything, ready for JSON; times in ms, memory in bytes."""
        stats = self.engine.stats()
        latencies = {
            f"{name}_p{percent}": percentile(values, percent) if values else None
            for name, values in (
                ("ttft", [1e3 * value for value in self.ttft]),
                ("itl", [1e3 * value for value in self.gaps]),
                ("step", [sample.step_ms for sample in self.samples]),
            )
            for percent in (50, 95, 99)
        }
        return {
            "environment": environment(self.engine),
            "requests": dict(self.reasons),
            "seconds": self.seconds,
            "steps": len(self.samples),
            "output_tokens": self.num_output_tokens,
            "tok_s": self.num_output_tokens / self.seconds,
            **latencies,
            "preemptions": stats["preemptions"],
            "copied_blocks": stats["copied_blocks"],
            "prefix_cache": stats["prefix_cache"],
            "memory": {**vars(self.memory), "growth": self.memory.growth},
            "kv_blocks": stats["kv"]["total"],
            "kv_watermark": stats["kv"]["watermark"],
            "blocks_lost": self.blocks_lost,
            "broken": self.broken,
            "is_good": self.is_good,
        }


def print_report(report: StressReport, args: argparse.Namespace) -> None:
    """What ran, and what became of it."""
    data = report.as_data()
    machine, cache, memory = data["environment"], data["prefix_cache"], report.memory
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(report.reasons.items()))
    num_after = len(report.samples) - int(len(report.samples) * WARM_UP_SHARE)
    lines = {
        "traffic": f"{args.requests:,} requests, {args.arrivals}, at most {args.concurrency} at "
        f"once, seed {args.seed}",
        "machine": f"{report.engine.model_name} on {machine['device']}, {machine['dtype']}, "
        f"{machine['threads']} threads; Python {machine['python']}, torch {machine['torch']}",
        "ended by": ends,
        "throughput": f"{data['tok_s']:,.0f} output tokens/s, "
        f"{report.num_ended / report.seconds:,.1f} requests/s; {report.num_output_tokens:,} tokens "
        f"in {report.seconds:.1f} s, {data['steps']:,} steps",
        "TTFT": _percentiles(data, "ttft"),
        "ITL": _percentiles(data, "itl"),
        "step": _percentiles(data, "step"),
        "preemptions": f"{data['preemptions']:,}; {data['copied_blocks']:,} blocks copied on write",
        "prefix cache": f"{cache['hit_rate']:.1%} of {cache['queried_tokens']:,} tokens found, "
        f"{report.num_cached_requests:,} requests hit, {cache['evictions']:,} evictions",
        "memory": f"{memory.last / _MB:,.0f} MB; growth after warm-up "
        f"{memory.growth / _MB:+.1f} MB in {num_after:,} steps, jitter "
        f"{memory.jitter / _MB:.1f} MB",
        "KV blocks": f"{data['kv_blocks']:,}, at most {data['kv_watermark']:,} in use",
        "blocks lost": str(report.blocks_lost),
    }
    if report.broken:
        lines["BROKEN"] = report.broken
    if report.num_ended < report.num_requests:
        lines["UNFINISHED"] = f"{report.num_requests - report.num_ended:,} requests"
    table = Table(box=None, show_header=False)
    table.add_column(no_wrap=True, style="bold")
    table.add_column()
    for name, text in lines.items():
        table.add_row(name, text)
    console.print(table)


def _percentiles(data: dict[str, Any], name: str) -> str:
    values = [data[f"{name}_p{percent}"] for percent in (50, 95, 99)]
    if None in values:
        return "-"
    p50, p95, p99 = values
    jitter = "" if name == "ttft" else f"; jitter (p99 - p50) {p99 - p50:,.1f} ms"
    return f"p50 {p50:,.1f}, p95 {p95:,.1f}, p99 {p99:,.1f} ms{jitter}"
