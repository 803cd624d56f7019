"""How a bench measures: runs of a workload, in rounds in which all contestants take turns.

Engines and baselines are timed in the same way, from outside with `time.perf_counter()`. All
requests are there at the start, and a token counts when the host knows it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from milestone_llm.consoles import log_console
from milestone_llm.frontend.engine import BaseEngine
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.gc_control import freeze_gc_heap
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.tracer import Tracer

from .workloads import Progress, WorkItem, serve, token_count

PERCENTS = (50, 95, 99)

Figures = dict[str, float]
"""Numbers by name. Times are in ms, except `seconds` and `cpu_seconds`."""
FactMaker = Callable[[Sequence[RequestOutput], Sequence[StepRecord]], Figures]
"""Computes further numbers from a run's outputs and step records, for one scenario."""


@dataclass
class RunResult:
    """Results of one run of a workload."""

    seconds: float
    token_ids: list[list[int]]
    """Each request's output tokens, without surplus ones."""
    token_times: list[list[float]]
    """When each of these tokens reached the host, in seconds after the start; empty if unknown."""
    facts: Figures = field(default_factory=dict)
    """Figures that only an engine has: steps, rows per step, useful share, KV watermark."""
    cpu_seconds: float = 0.0
    """CPU time of all threads. It tells a slow contestant from a busy machine."""

    def figures(self) -> Figures:
        """Return `tok_s`, `seconds`, `ttft_p50` and similar, and the facts.

        ttft: from the start of the run to a request's first token. tpot: mean time between its
        tokens. itl: time between two tokens of a request. latency: from the start to its last one.
        """
        num_tokens = sum(map(len, self.token_ids))
        numbers = {"num_tokens": num_tokens, "tok_s": num_tokens / self.seconds}
        numbers |= {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds, **self.facts}
        times = [np.array(request) for request in self.token_times if request]
        gaps = [np.diff(request) for request in times if len(request) > 1]
        latencies = {
            "ttft": [request[0] for request in times],
            "tpot": [request.mean() for request in gaps],
            "itl": np.concatenate(gaps) if gaps else [],
            "latency": [request[-1] for request in times],
        }
        for name, values in latencies.items():
            if len(values):
                numbers[f"{name}_mean"] = 1e3 * float(np.mean(values))
                for percent in PERCENTS:
                    numbers[f"{name}_p{percent}"] = 1e3 * percentile(values, percent)
        return numbers


ServeWork = Callable[[Sequence[WorkItem], Progress], RunResult]
Contestant = BaseEngine | ServeWork
"""An engine of this project, or a function that does the work in another way."""
Results = dict[str, list[RunResult]]
"""Results of each contestant, one a round; all others are compared with the first."""


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """Return the value below which `percent` of the values are, interpolated between neighbours."""
    return float(np.percentile(values, percent))


def run_engine(
    engine: Any, items: Sequence[WorkItem], progress: Progress, facts: FactMaker | None = None
) -> RunResult:
    """Serve the items with an engine of any milestone. With `facts`, every step is recorded."""
    if hasattr(engine, "reset_prefix_cache"):  # so that nothing is left from the last run
        engine.reset_prefix_cache()
    tracer = Tracer()
    if facts is not None:
        engine.step_log.watch(tracer)
    before = dict(engine.step_log.counts)
    start = time.perf_counter()
    outputs = serve(engine, items, on_step=lambda changed: progress(len(changed)))
    num_characters = sum(len(output.text) for output in outputs)  # text is decoded when it is read
    seconds = time.perf_counter() - start
    if facts is not None:
        engine.step_log.unwatch(tracer)
    counts = {name: engine.step_log.counts[name] - before[name] for name in before}
    computed = counts["prefill_tokens"] + counts["decode_tokens"]
    num_tokens = sum(len(output.token_ids) for output in outputs)
    return RunResult(
        seconds=seconds,
        token_ids=[output.token_ids for output in outputs],
        token_times=[[at - start for at in out.metrics.token_times] for out in outputs],
        facts={
            "steps": counts["steps"],
            "rows_per_step": counts["rows"] / counts["steps"],
            "tokens_per_step": num_tokens / counts["steps"],
            "useful_share": (computed - counts["recomputed_tokens"])
            / (computed + counts["padding_tokens"]),
            "kv_watermark": engine.stats()["kv"]["watermark"],
            "characters": num_characters,
            **(facts(outputs, tracer.records) if facts else {}),
        },
    )


def check_work(name: str, items: Sequence[WorkItem], result: RunResult) -> None:
    """Check that a contestant did all the work; otherwise figures could not be compared.

    Raises:
        RuntimeError: a request has fewer or more tokens than `max_tokens`.
    """
    for index, (item, token_ids) in enumerate(zip(items, result.token_ids, strict=True)):
        if len(token_ids) != item.params.max_tokens:
            raise RuntimeError(
                f"{name}: request {index} got {len(token_ids)} tokens instead of "
                f"{item.params.max_tokens}"
            )


def short_work(items: Sequence[WorkItem]) -> list[WorkItem]:
    """Return the warm-up: other prompts of the same lengths (no cache has them), short outputs."""
    short = [replace(item.params, max_tokens=min(4, item.params.max_tokens)) for item in items]
    return [
        replace(item, prompt=item.prompt[::-1], params=params)
        for item, params in zip(items, short, strict=True)
    ]


def measure(
    contestants: Mapping[str, Contestant],
    items: Sequence[WorkItem],
    rounds: int,
    facts: FactMaker | None = None,
    has_bar: bool = True,
) -> Results:
    """Run every contestant once a round, so that other work on the machine slows all of them.

    Every second round has the reverse order, so that no contestant always runs on a machine that
    another one has heated up.
    """

    def run(name: str, work: Sequence[WorkItem], what: str) -> RunResult:
        each = contestants[name]
        serve_work: ServeWork = (
            partial(run_engine, each, facts=facts) if isinstance(each, BaseEngine) else each
        )
        total = sum(item.params.max_tokens for item in work)
        with token_count(f"{what}  {name}", total, is_hidden=not has_bar) as progress:
            return serve_work(work, progress)

    names = list(contestants)
    for name in names:
        run(name, short_work(items), "warm-up")
    freeze_gc_heap()
    results: Results = {name: [] for name in names}
    for number in range(1, rounds + 1):
        for name in names if number % 2 else names[::-1]:
            cpu_start = time.process_time()
            result = run(name, items, f"round {number}/{rounds}")
            result.cpu_seconds = time.process_time() - cpu_start
            check_work(name, items, result)
            results[name].append(result)
            speed = sum(map(len, result.token_ids)) / result.seconds
            log_console.print(
                f"round {number}/{rounds}  {name:<20} {speed:>10,.1f} tok/s {result.seconds:8.2f} s"
            )
    return results


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return each figure's median over the rounds; of several rounds, also `tok_s_min` and
    `tok_s_max`."""
    figures = {
        name: float(statistics.median(each[name] for each in rounds if name in each))
        for name in rounds[0]
    }
    if len(rounds) > 1:
        speeds = [each["tok_s"] for each in rounds]
        figures |= {"tok_s_min": min(speeds), "tok_s_max": max(speeds)}
    return figures


def speedups(results: Mapping[str, Sequence[RunResult]]) -> dict[str, dict[str, Any]]:
    """Return how many times faster the first contestant was than each other: median, and by
    round."""
    ours, *others = results
    found = {}
    for name in others:
        pairs = zip(results[ours], results[name], strict=True)
        ratios = [their.seconds / our.seconds for our, their in pairs]
        found[name] = {"median": statistics.median(ratios), "rounds": ratios}
    return found


def gap_figures(outputs: Sequence[RequestOutput]) -> Figures:
    """Return percentiles of the times between two tokens of a request, over all requests, in ms."""
    gaps = np.concatenate([np.diff(output.metrics.token_times) for output in outputs])
    values = 1e3 * np.percentile(gaps if gaps.size else [0.0], (50, 99, 100))
    return dict(zip(("gap_p50", "gap_p99", "gap_max"), map(float, values), strict=True))
