"""How a benchmark measures: what one run of a workload gave, and medians over several runs.

Everything is timed from outside with `time.perf_counter()`, the engine and the baselines alike:
all requests are there at the start, and a token counts when the host knows it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from .workloads import WorkItem, serve

Progress = Callable[[int], None]
"""Called with the number of output tokens that have come since the last call."""


@dataclass
class RunResult:
    """One run of a workload by one contestant."""

    seconds: float
    token_ids: list[list[int]]
    """Each request's output, and no token more."""
    token_times: list[list[float]]
    """When each of these tokens was known, in seconds after the start; empty where not known."""
    facts: dict[str, float] = field(default_factory=dict)
    """What only an engine tells: steps, rows per step, useful share, KV watermark."""
    cpu_seconds: float = 0.0
    """CPU time of all threads; tells a slow contestant from a busy machine."""

    def figures(self) -> dict[str, float]:
        """Numbers by name: `tok_s`, `seconds`, `ttft_p50` and its like (ms), and the facts."""
        num_tokens = sum(map(len, self.token_ids))
        numbers = {"tok_s": num_tokens / self.seconds, "seconds": self.seconds}
        numbers |= {"cpu_seconds": self.cpu_seconds, **self.facts}
        times = [request for request in self.token_times if request]
        gaps = [[after - before for before, after in pairwise(request)] for request in times]
        latencies = {
            "ttft": [request[0] for request in times],
            "tpot": [statistics.fmean(request) for request in gaps if request],
            "itl": [gap for request in gaps for gap in request],
        }
        for name, values in latencies.items():
            for percent in (50, 95, 99):
                if values:
                    numbers[f"{name}_p{percent}"] = 1e3 * percentile(values, percent)
        return numbers


@dataclass(frozen=True)
class Contestant:
    """Somebody who can do the work: the engine, or what it is compared with."""

    name: str
    run: Callable[[Sequence[WorkItem], Progress], RunResult]


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def engine_contestant(engine: Any) -> Contestant:
    """An engine of any milestone."""

    def run(items: Sequence[WorkItem], progress: Progress) -> RunResult:
        if hasattr(engine, "reset_prefix_cache"):
            engine.reset_prefix_cache()  # nothing may be left of the run before
        before = engine.stats()
        start = time.perf_counter()
        outputs = serve(engine, items, on_step=lambda changed: progress(len(changed)))
        seconds = time.perf_counter() - start
        after = engine.stats()
        counts = {
            name: after[name] - before[name]
            for name in ("steps", "rows", "prefill_tokens", "decode_tokens", "padding_tokens")
        }
        useful = counts["prefill_tokens"] + counts["decode_tokens"]
        return RunResult(
            seconds=seconds,
            token_ids=[output.token_ids for output in outputs],
            token_times=[[at - start for at in out.metrics.token_times] for out in outputs],
            facts={
                "steps": counts["steps"],
                "rows_per_step": counts["rows"] / counts["steps"],
                "useful_share": useful / (useful + counts["padding_tokens"]),
                "kv_watermark": after["kv"]["watermark"],
            },
        )

    return Contestant(engine.milestone, run)


def check_work(name: str, items: Sequence[WorkItem], result: RunResult) -> None:
    """Every contestant must have done all of the work, or figures could not be compared.

    Raises:
        RuntimeError: a request has fewer or more tokens than it was to get.
    """
    for index, (item, token_ids) in enumerate(zip(items, result.token_ids, strict=True)):
        if len(token_ids) != item.params.max_tokens:
            raise RuntimeError(
                f"{name}: request {index} got {len(token_ids)} tokens instead of "
                f"{item.params.max_tokens}"
            )


def short_work(items: Sequence[WorkItem], max_tokens: int = 4) -> list[WorkItem]:
    """The warm-up: other prompts of the same lengths (no cache will know them), short outputs."""
    return [
        replace(
            item,
            prompt=item.prompt[::-1],
            params=replace(item.params, max_tokens=min(max_tokens, item.params.max_tokens)),
        )
        for item in items
    ]


def measure(
    contestants: Sequence[Contestant],
    items: Sequence[WorkItem],
    rounds: int,
    on_run: Callable[[str, int], Progress],
    on_done: Callable[[str, int, RunResult], None],
) -> dict[str, list[RunResult]]:
    """Run everybody once a round, so that whatever else the machine does hits all of them.

    Every second round goes backwards: nobody always runs on the machine that another has heated.

    Args:
        on_run: called with a name and a round before each run (0 is the warm-up); returns what
            takes the run's progress.
        on_done: called after each run that counts.

    Returns:
        Per contestant one result a round.
    """
    for contestant in contestants:
        contestant.run(short_work(items), on_run(contestant.name, 0))
    results: dict[str, list[RunResult]] = {contestant.name: [] for contestant in contestants}
    for number in range(1, rounds + 1):
        for contestant in contestants if number % 2 else contestants[::-1]:
            cpu_start = time.process_time()
            result = contestant.run(items, on_run(contestant.name, number))
            result.cpu_seconds = time.process_time() - cpu_start
            check_work(contestant.name, items, result)
            results[contestant.name].append(result)
            on_done(contestant.name, number, result)
    return results


def medians(results: Sequence[RunResult]) -> dict[str, float]:
    """Each figure's median over the rounds; `tok_s_min` and `tok_s_max` give the spread."""
    rounds = [result.figures() for result in results]
    figures = {
        name: statistics.median(each[name] for each in rounds if name in each) for name in rounds[0]
    }
    speeds = [each["tok_s"] for each in rounds]
    return {**figures, "tok_s_min": min(speeds), "tok_s_max": max(speeds)}


def speedups(ours: Sequence[RunResult], theirs: Sequence[RunResult]) -> list[float]:
    """How many times faster we were, round by round."""
    return [other.seconds / own.seconds for own, other in zip(ours, theirs, strict=True)]
