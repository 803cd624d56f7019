"""The report of a stress run: speed, evenness, memory, and blocks that came back."""

from __future__ import annotations

import argparse
import os
import sys
import time
from array import array
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from milestone_llm.lab.bench.contest import environment, machine_text
from milestone_llm.lab.demo import show
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.lab.trace.text import plural

WARM_UP_SHARE = 0.2
"""The first steps fill allocators and caches: growth is counted from there on."""
MB = 2**20


def resident_bytes() -> int:
    """Physical memory of this process; where the system does not say, the most it ever had."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class Sample(NamedTuple):
    """The engine after one step: seconds, milliseconds, bytes, and numbers of requests and blocks.

    `allocated` is what tensors on a GPU hold; `preemptions` counts from the start.
    """

    time: float
    step_ms: float
    resident: int
    allocated: int
    running: int
    waiting: int
    used_blocks: int
    cached_blocks: int
    preemptions: int


class MemoryTrend(NamedTuple):
    """Process memory after the warm-up, in bytes; jitter is the deviation from a straight line."""

    first: float
    last: float
    growth: float
    growth_per_step: float
    jitter: float

    @classmethod
    def of(cls, resident: list[int]) -> MemoryTrend:
        """Fit a straight line, least squares, to the samples after the warm-up."""
        kept = np.array(resident[int(len(resident) * WARM_UP_SHARE) :] or [0], float)
        steps = np.arange(len(kept))
        slope, first = np.polyfit(steps, kept, 1) if len(kept) > 1 else (0.0, kept[0])
        line = first + slope * steps
        numbers = (first, line[-1], line[-1] - first, slope, (kept - line).std())
        return cls(*map(float, numbers))


@dataclass
class StressReport:
    """Collects while the traffic runs; `close` checks that the engine holds nothing any more."""

    engine: Any
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
    start: float = field(default_factory=time.perf_counter)
    seconds: float = 0.0

    @property
    def num_ended(self) -> int:
        """Requests that have ended, for whatever reason."""
        return sum(self.reasons.values())

    @property
    def is_good(self) -> bool:
        """Every block came back, every request ended, none in an error, all invariants held."""
        is_complete = self.num_ended == self.num_requests and not self.reasons["error"]
        return is_complete and not self.blocks_lost and not self.broken

    def sample(self, start: float) -> None:
        """Take the figures of a step that began at `start` and has just ended."""
        now, scheduler = time.perf_counter(), self.engine.scheduler
        usage, num_preemptions = scheduler.kv_usage(), scheduler.preempter.num_preemptions
        queues = len(scheduler.running), len(scheduler.waiting)
        step = (
            now - self.start,
            (now - start) * 1e3,
            resident_bytes(),
            torch.cuda.memory_allocated(),
        )
        self.samples.append(Sample(*step, *queues, usage.used, usage.cached, num_preemptions))

    def add(self, output: RequestOutput) -> None:
        """Take the figures of a request that has ended."""
        self.reasons[str(output.outputs[0].finish_reason)] += 1
        self.num_output_tokens += sum(len(each.token_ids) for each in output.outputs)
        self.num_cached_requests += output.metrics.num_cached_tokens > 0
        if output.metrics.ttft is not None:
            self.ttft.append(1e3 * output.metrics.ttft)
        self.gaps.extend(1e3 * np.diff(output.metrics.token_times))

    def close(self) -> None:
        """The run is over: count what did not come back."""
        self.seconds = time.perf_counter() - self.start
        scheduler = self.engine.scheduler
        if not scheduler.running and not scheduler.waiting:
            pools = scheduler.kv.pool, scheduler.preempter.host.pool
            self.blocks_lost = sum(pool.num_blocks - pool.num_free for pool in pools)
        self.memory = MemoryTrend.of([sample.resident for sample in self.samples])
        self.gpu_memory = MemoryTrend.of([sample.allocated for sample in self.samples])

    def as_data(self) -> dict[str, Any]:
        """Everything, ready for JSON; times in ms, memory in bytes."""
        stats = self.engine.stats()
        times = {"ttft": self.ttft, "itl": self.gaps, "step": [s.step_ms for s in self.samples]}
        latencies = {
            f"{name}_p{percent}": float(np.percentile(values, percent)) if len(values) else None
            for name, values in times.items()
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
            "memory": self.memory._asdict(),
            "gpu_memory": {**self.gpu_memory._asdict(), **allocator_figures(self.engine)},
            "kv_blocks": stats["kv"]["total"],
            "kv_watermark": stats["kv"]["watermark"],
            "blocks_lost": self.blocks_lost,
            "broken": self.broken,
            "is_good": self.is_good,
        }


def print_report(report: StressReport, args: argparse.Namespace) -> None:
    """What ran, and what became of it."""
    data = report.as_data()
    cache, memory = data["prefix_cache"], report.memory
    lines = {
        "traffic": f"{plural(args.requests, 'request')}, {args.arrivals}, at most "
        f"{args.concurrency} at once, seed {args.seed}",
        "machine": f"{report.engine.model_name} on {machine_text(data['environment'])}",
        "ended by": ", ".join(f"{n} {reason}" for reason, n in sorted(report.reasons.items())),
        "throughput": f"{data['tok_s']:,.0f} output tokens/s, "
        f"{report.num_ended / report.seconds:,.1f} requests/s; {report.num_output_tokens:,} tokens "
        f"in {report.seconds:.1f} s, {plural(data['steps'], 'step')}",
        **{name: _percentiles(data, name.lower()) for name in ("TTFT", "ITL", "step")},
        "preemptions": f"{data['preemptions']:,}; {plural(data['copied_blocks'], 'block')} copied "
        "on write",
        "prefix cache": f"{cache['hit_rate']:.1%} of {cache['queried_tokens']:,} tokens found, "
        f"{plural(report.num_cached_requests, 'request')} hit, "
        f"{plural(cache['evictions'], 'eviction')}",
        "memory": f"{memory.last / MB:,.0f} MB; growth after warm-up {memory.growth / MB:+.1f} MB, "
        f"jitter {memory.jitter / MB:.1f} MB",
        **_gpu_memory(report, data["gpu_memory"]),
        "KV blocks": f"{data['kv_blocks']:,}, at most {data['kv_watermark']:,} in use",
        "blocks lost": str(report.blocks_lost),
    }
    if report.broken:
        lines["BROKEN"] = report.broken
    if report.num_ended < report.num_requests:
        lines["UNFINISHED"] = plural(report.num_requests - report.num_ended, "request")
    show.facts(lines)


def allocator_figures(engine: Any) -> dict[str, int]:
    """What CUDA's caching allocator keeps, in bytes, and how often it had to give memory back."""
    if engine.model.device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(engine.model.device)
    return {
        "reserved": stats["reserved_bytes.all.current"],
        "idle": stats["reserved_bytes.all.current"] - stats["allocated_bytes.all.current"],
        "retries": stats["num_alloc_retries"],
    }


def _gpu_memory(report: StressReport, data: dict[str, Any]) -> dict[str, str]:
    if "reserved" not in data:
        return {}
    memory = report.gpu_memory
    return {
        "GPU memory": f"{memory.last / MB:,.1f} MB in tensors; growth after warm-up "
        f"{memory.growth / MB:+.1f} MB, jitter {memory.jitter / MB:.1f} MB; the allocator keeps "
        f"{data['reserved'] / MB:,.0f} MB, {data['idle'] / MB:,.0f} MB of it idle; "
        f"{data['retries']} times it had to give memory back first"
    }


def _percentiles(data: dict[str, Any], name: str) -> str:
    if data[f"{name}_p50"] is None:
        return "-"
    p50, p95, p99 = (data[f"{name}_p{percent}"] for percent in (50, 95, 99))
    jitter = "" if name == "ttft" else f"; jitter (p99 - p50) {p99 - p50:,.1f} ms"
    return f"p50 {p50:,.1f}, p95 {p95:,.1f}, p99 {p99:,.1f} ms{jitter}"
