"""How a benchmark measures: what one run of a workload gave, and rounds in which all take turns.

Everything is timed from outside with `time.perf_counter()`, the engine and the baselines alike:
all requests are there at the start, and a token counts when the host knows it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from milestone_llm.cli import freeze_garbage, log_console, progress_bar
from milestone_llm.threads import ThreadWatch
from milestone_llm.lab.trace.explore import Run
from milestone_llm.lab.trace.text import plural
from milestone_llm.lab.trace.tracer import Tracer

from .workloads import WorkItem, serve

Progress = Callable[[int], None]
"""Called with the number of output tokens that have come since the last call."""
Figures = dict[str, float]
"""Numbers by name. Times are in ms, but `seconds` and `cpu_seconds`."""
FactMaker = Callable[[Sequence[Any], Sequence[Any]], Figures]
"""From a run's outputs and step records to numbers that only one scenario shows."""
PERCENTS = (50, 95, 99)


@dataclass
class RunResult:
    """One run of a workload by one contestant."""

    seconds: float
    token_ids: list[list[int]]
    """Each request's output, and no token more."""
    token_times: list[list[float]]
    """When each of these tokens was known, in seconds after the start; empty where not known."""
    facts: Figures = field(default_factory=dict)
    """What only an engine knows: steps, rows per step, useful share, KV watermark."""
    cpu_seconds: float = 0.0
    """CPU time of all threads; tells a slow contestant from a busy machine."""

    def figures(self) -> Figures:
        """`tok_s`, `seconds`, `ttft_p50` and its like, and the facts.

        ttft: start of the run until a request's first token. tpot: mean time between its tokens.
        itl: time between any two tokens of a request. latency: start of the run until its last.
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


@dataclass(frozen=True)
class Contestant:
    """A contestant that can do the work: the engine, or a baseline."""

    name: str
    run: Callable[[Sequence[WorkItem], Progress], RunResult]
    engine: Any = None
    """Of this project, or None."""
    facts: FactMaker | None = None


def percentile(values: Sequence[float] | np.ndarray, percent: float) -> float:
    """The value below which `percent` of the values lie, interpolated between neighbours."""
    return float(np.percentile(values, percent))


def engine_contestant(
    engine: Any, name: str | None = None, facts: FactMaker | None = None
) -> Contestant:
    """An engine of any milestone. With `facts`, every step of it is recorded."""

    def run(items: Sequence[WorkItem], progress: Progress) -> RunResult:
        prepare(engine, is_traced=facts is not None)
        before = engine.stats()
        start = time.perf_counter()
        outputs = serve(engine, items, on_step=lambda changed: progress(len(changed)))
        seconds = time.perf_counter() - start
        after = engine.stats()
        counts = {
            name: after[name] - before[name]
            for name in before
            if name in ("steps", "rows") or name.endswith("_tokens")
        }
        computed = counts["prefill_tokens"] + counts["decode_tokens"]
        return RunResult(
            seconds=seconds,
            token_ids=[output.token_ids for output in outputs],
            token_times=[[at - start for at in out.metrics.token_times] for out in outputs],
            facts={
                "steps": counts["steps"],
                "rows_per_step": counts["rows"] / counts["steps"],
                "tokens_per_step": sum(len(out.token_ids) for out in outputs) / counts["steps"],
                "useful_share": (computed - counts["recomputed_tokens"])
                / (computed + counts["padding_tokens"]),
                "kv_watermark": after["kv"]["watermark"],
                **(facts(outputs, engine.tracer.records) if facts else {}),
            },
        )

    return Contestant(name or engine.milestone, run, engine, facts)


def prepare(engine: Any, is_traced: bool) -> None:
    """Before a run: nothing may be left of the one before, in the cache or in the trace."""
    if hasattr(engine, "reset_prefix_cache"):
        engine.reset_prefix_cache()
    if is_traced:
        engine.tracer = Tracer()


def traced_run(contestant: Contestant, items: Sequence[WorkItem]) -> Run:
    """Serve the work once more with an engine, for the page that replays it."""
    engine = contestant.engine
    before = engine.tracer
    prepare(engine, is_traced=True)
    serve(engine, items)
    run = Run.of(contestant.name, engine)
    engine.tracer = before
    return run


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
    has_bar: bool = True,
) -> dict[str, list[RunResult]]:
    """Run everybody once a round, so that whatever else the machine does hits all of them.

    Every second round goes backwards: no contestant always runs on a machine that another has
    heated.

    Returns:
        Per contestant one result a round.
    """
    results: dict[str, list[RunResult]] = {contestant.name: [] for contestant in contestants}
    engines = [each.engine for each in contestants if each.engine is not None]
    watch = ThreadWatch(engines[0].model.device.type if engines else "")
    with progress_bar(is_hidden=not has_bar) as bar:
        task = bar.add_task("", count="")

        def run(contestant: Contestant, work: Sequence[WorkItem], what: str) -> RunResult:
            total = sum(item.params.max_tokens for item in work)
            bar.reset(task, description=f"{what}  {contestant.name}", total=total, count="")
            num_tokens, last, next_update = 0, time.perf_counter(), 0.0

            def progress(num_new: int) -> None:
                nonlocal num_tokens, last, next_update
                num_tokens += num_new
                now = time.perf_counter()
                watch.note_step(now - last, num_new)
                last = now
                if now > next_update:  # a GPU's step is short
                    bar.update(task, completed=num_tokens, count=plural(num_tokens, "token"))
                    next_update = now + 0.2

            return contestant.run(work, progress)

        for contestant in contestants:
            run(contestant, short_work(items), "warm-up")
        freeze_garbage()
        for number in range(1, rounds + 1):
            for contestant in contestants if number % 2 else contestants[::-1]:
                cpu_start = time.process_time()
                result = run(contestant, items, f"round {number}/{rounds}")
                result.cpu_seconds = time.process_time() - cpu_start
                check_work(contestant.name, items, result)
                results[contestant.name].append(result)
                log_round(number, rounds, contestant.name, result)
    return results


def log_round(number: int, rounds: int, name: str, result: RunResult) -> None:
    """One line for a run that counts."""
    speed = sum(map(len, result.token_ids)) / result.seconds
    log_console.print(
        f"round {number}/{rounds}  {name:<20} {speed:>10,.1f} tok/s {result.seconds:8.2f} s"
    )


def medians(rounds: Sequence[Figures]) -> Figures:
    """Each figure's median over the rounds; `tok_s_min` and `tok_s_max` if there are several."""
    figures = {
        name: float(np.median([each[name] for each in rounds if name in each]))
        for name in rounds[0]
    }
    if len(rounds) > 1:
        speeds = [each["tok_s"] for each in rounds]
        figures |= {"tok_s_min": min(speeds), "tok_s_max": max(speeds)}
    return figures


def speedups(results: Mapping[str, Sequence[RunResult]]) -> dict[str, dict[str, Any]]:
    """How many times faster the first contestant was than each other: median, and by round."""
    ours, *others = results
    ratios = {
        name: [
            their.seconds / our.seconds
            for our, their in zip(results[ours], results[name], strict=True)
        ]
        for name in others
    }
    return {
        name: {"median": float(np.median(values)), "rounds": values}
        for name, values in ratios.items()
    }
