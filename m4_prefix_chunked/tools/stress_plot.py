"""A stress run over time, in one picture: requests, KV blocks, step times, process memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from milestone_llm.bench.measure import percentile
from milestone_llm.plots.style import CACHED_STYLE, PHASE_STYLE, STORED_STYLE

from .stress_report import WARM_UP_SHARE, StressReport

_MB = 2**20


def draw_stress(report: StressReport, path: Path) -> None:
    """Write the picture; a run without steps gives none."""
    if not report.samples:
        return
    start = report.samples[0].time - report.samples[0].step_ms / 1e3
    seconds = [sample.time - start for sample in report.samples]
    rc = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    with matplotlib.rc_context(rc):
        figure = Figure(figsize=(9.5, 9), layout="constrained")
        panels = figure.subplots(4, 1, sharex=True)
        _draw_requests(panels[0], report, seconds)
        _draw_blocks(panels[1], report, seconds)
        _draw_steps(panels[2], report, seconds)
        _draw_memory(panels[3], report, seconds)
        for axes in panels:
            axes.grid(color="#e4e4e4", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.set_ylim(bottom=0 if axes is not panels[3] else None)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        panels[0].set_xlim(0, seconds[-1])
        panels[-1].set_xlabel("seconds")
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)


def _draw_requests(axes: Axes, report: StressReport, seconds: list[float]) -> None:
    running = [sample.running for sample in report.samples]
    waiting = [sample.waiting for sample in report.samples]
    style = PHASE_STYLE["decode"]
    axes.stackplot(
        seconds,
        running,
        waiting,
        colors=[style.fill, PHASE_STYLE["waiting"].thin_fill],
        labels=["running", "waiting"],
    )
    counts = [0, *(sample.preemptions for sample in report.samples)]
    places = [i for i, (before, after) in enumerate(pairwise(counts)) if after > before]
    axes.plot(
        [seconds[place] for place in places],
        [running[place] for place in places],
        "v",
        markersize=4,
        markerfacecolor="white",
        markeredgecolor=PHASE_STYLE["preempted"].ink,
        label=f"preemption ({counts[-1]:,})",
    )
    axes.set_title(f"requests in the engine ({report.num_ended:,} ended)", loc="left")


def _draw_blocks(axes: Axes, report: StressReport, seconds: list[float]) -> None:
    used = [sample.used_blocks for sample in report.samples]
    with_cached = [sample.used_blocks + sample.cached_blocks for sample in report.samples]
    total = report.engine.scheduler.kv.pool.num_blocks
    axes.fill_between(seconds, 0, used, color=STORED_STYLE.fill, label="in use", linewidth=0)
    axes.fill_between(
        seconds,
        used,
        with_cached,
        facecolor=CACHED_STYLE.fill,
        edgecolor=CACHED_STYLE.ink,
        hatch=CACHED_STYLE.hatch,
        linewidth=0,
        label="free, cached",
    )
    axes.axhline(total, color="black", linewidth=1, linestyle=(0, (4, 2)), label="all")
    axes.set_title(f"KV blocks ({report.blocks_lost} lost)", loc="left")


def _draw_steps(axes: Axes, report: StressReport, seconds: list[float]) -> None:
    times = [sample.step_ms for sample in report.samples]
    p50, p99 = percentile(times, 50), percentile(times, 99)
    axes.plot(seconds, times, ".", markersize=2.5, color=PHASE_STYLE["prefill"].ink, label="a step")
    axes.axhline(p50, color="black", linewidth=1, label=f"p50 {p50:.1f} ms")
    axes.axhline(p99, color="black", linewidth=1, linestyle=":", label=f"p99 {p99:.1f} ms")
    axes.set_title(f"ms a step: jitter (p99 - p50) {p99 - p50:.1f} ms", loc="left")
    axes.set_ylim(0, max(1.3 * p99, 1e-3))


def _draw_memory(axes: Axes, report: StressReport, seconds: list[float]) -> None:
    memory, first = report.memory, int(len(seconds) * WARM_UP_SHARE)
    values = [sample.resident / _MB for sample in report.samples]
    axes.plot(seconds, values, color=STORED_STYLE.ink, label="measured")
    trend = [(memory.first + step * memory.growth_per_step) / _MB for step in range(len(seconds))]
    axes.plot(seconds[first:], trend[: len(seconds) - first], "k--", linewidth=1, label="trend")
    axes.axvline(
        seconds[first], color="#7a7a7a", linewidth=0.8, linestyle=":", label="warm-up ends"
    )
    axes.set_title(
        f"process memory, MB: growth {memory.growth / _MB:+.1f} MB, "
        f"jitter {memory.jitter / _MB:.1f} MB",
        loc="left",
    )
    low, high = min(values), max(values)
    axes.set_ylim(low - 5, high + max(5, (high - low) * 0.1))
