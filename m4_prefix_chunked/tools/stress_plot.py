"""A stress run over time, in one picture: requests, KV blocks, step times, process memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from milestone_llm.lab.plots.style import CACHED_STYLE, PHASE_STYLE, STORED_STYLE

from .stress_report import MB, WARM_UP_SHARE, Sample, StressReport


def draw_stress(report: StressReport, path: Path) -> None:
    """Write the picture of a run of at least one step."""
    at: Any = Sample(*np.array(report.samples).T)  # a field is an array over all steps
    with matplotlib.rc_context({"font.size": 9, "axes.spines.top": False}):
        figure = Figure(figsize=(9.5, 9), layout="constrained")
        requests, blocks, steps, memory = panels = figure.subplots(4, 1, sharex=True)

        waiting = PHASE_STYLE["waiting"].thin_fill
        colors = [PHASE_STYLE["decode"].fill, waiting]
        requests.stackplot(
            at.time, at.running, at.waiting, colors=colors, labels=["running", "waiting"]
        )
        new = np.diff(at.preemptions, prepend=0) > 0
        look = {"mfc": "white", "mec": PHASE_STYLE["preempted"].ink, "markersize": 4}
        label = f"preemption ({report.samples[-1].preemptions:,})"
        requests.plot(at.time[new], at.running[new], "v", label=label, **look)
        requests.set_title(f"requests in the engine ({report.num_ended:,} ended)", loc="left")

        blocks.fill_between(at.time, at.used_blocks, color=STORED_STYLE.fill, label="in use")
        blocks.fill_between(
            at.time,
            at.used_blocks,
            at.used_blocks + at.cached_blocks,
            facecolor=CACHED_STYLE.fill,
            edgecolor=CACHED_STYLE.ink,
            hatch=CACHED_STYLE.hatch,
            linewidth=0,
            label="free, cached",
        )
        blocks.axhline(report.engine.stats()["kv"]["total"], color="black", ls="--", label="all")
        blocks.set_title(f"KV blocks ({report.blocks_lost} lost)", loc="left")

        p50, p99 = np.percentile(at.step_ms, (50, 99))
        ink = PHASE_STYLE["prefill"].ink
        steps.plot(at.time, at.step_ms, ".", markersize=2.5, color=ink, label="a step")
        steps.axhline(p50, color="black", linewidth=1, label=f"p50 {p50:.1f} ms")
        steps.axhline(p99, color="black", linewidth=1, ls=":", label=f"p99 {p99:.1f} ms")
        steps.set_title(f"ms a step: jitter (p99 - p50) {p99 - p50:.1f} ms", loc="left")
        steps.set_ylim(0, max(1.3 * p99, 1e-3))

        trend, after = report.memory, at.time[int(len(at.time) * WARM_UP_SHARE) :]
        line = (trend.first + trend.growth_per_step * np.arange(len(after))) / MB
        memory.plot(at.time, at.resident / MB, color=STORED_STYLE.ink, label="measured")
        memory.plot(after, line, "k--", linewidth=1, label="trend")
        memory.axvline(after[0], color="#7a7a7a", linewidth=0.8, ls=":", label="warm-up ends")
        text = f"growth {trend.growth / MB:+.1f} MB, jitter {trend.jitter / MB:.1f} MB"
        memory.set_title(f"process memory, MB: {text}", loc="left")
        low, high = at.resident.min() / MB, at.resident.max() / MB
        memory.set_ylim(low - 5, high + max(5, (high - low) * 0.1))

        for axes in panels:
            axes.grid(color="#e4e4e4", linewidth=0.6)
            axes.set_axisbelow(True)
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
        for axes in (requests, blocks):
            axes.set_ylim(bottom=0)
        memory.set_xlim(0, at.time[-1])
        memory.set_xlabel("seconds")
        figure.savefig(path, dpi=130)
