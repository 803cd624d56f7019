"""A contest: engines that differ in one switch, at the same work, and what is compared of them."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from m4_prefix_chunked.engine import LLMEngine
from milestone_llm.bench.command import config_fields
from milestone_llm.bench.measure import Contestant, Progress, RunResult, measure, short_work
from milestone_llm.bench.report import describe_work, environment
from milestone_llm.bench.workloads import WorkItem, serve
from milestone_llm.cli import log_console
from milestone_llm.engine.outputs import RequestOutput
from milestone_llm.models.checkpoint import LoadedModel
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.tracer import Tracer

Figures = dict[str, float]
FigureMaker = Callable[[Sequence[RequestOutput], Sequence[StepRecord]], Figures]


@dataclass(frozen=True)
class Target:
    """A ratio of two contestants' figures, and how large it may be (None: it is only told)."""

    meaning: str
    figure: str
    ours: str
    theirs: str
    at_most: float | None = None
    loses: str = ""
    """What to say where the ratio is above 1.02: an optimisation that costs something."""


@dataclass
class Contest:
    """Engines that differ in one switch, the same work for all, and what to compare."""

    title: str
    loaded: LoadedModel
    engines: Mapping[str, Any]
    """Of this milestone, or of one before it."""
    items: list[WorkItem]
    figures: FigureMaker
    columns: Mapping[str, str]
    """Figures to show, with their headings."""
    targets: Sequence[Target]
    seed: int
    results: dict[str, list[RunResult]] = field(default_factory=dict)

    def run(self, rounds: int) -> None:
        """Warm up, then let the contestants take turns in every round."""
        self.results = measure(
            [self._contestant(name, engine) for name, engine in self.engines.items()],
            self.items,
            rounds,
            lambda name, number: lambda num_new: None,
            lambda name, number, result: log_console.print(
                f"round {number}/{rounds}  {name:<20} {result.seconds:8.2f} s"
            ),
        )

    def _contestant(self, name: str, engine: LLMEngine) -> Contestant:
        def run(items: Sequence[WorkItem], progress: Progress) -> RunResult:
            engine.reset_prefix_cache()
            engine.tracer = Tracer()  # all contestants have one: it costs them the same
            start = time.perf_counter()
            outputs = serve(engine, items)
            seconds = time.perf_counter() - start
            records = engine.tracer.records
            return RunResult(
                seconds=seconds,
                token_ids=[output.token_ids for output in outputs],
                token_times=[[at - start for at in out.metrics.token_times] for out in outputs],
                facts={"steps": len(records), **self.figures(outputs, records)},
            )

        return Contestant(name, run)

    def ratios(self, target: Target) -> list[float]:
        """Our figure over theirs, round by round."""
        pairs = zip(self.results[target.ours], self.results[target.theirs], strict=True)
        return [own.figures()[target.figure] / its.figures()[target.figure] for own, its in pairs]

    def as_data(self) -> dict[str, Any]:
        """All that was set and measured, ready for JSON. Times are in ms, `seconds` in seconds."""
        engine = next(iter(self.engines.values()))
        targets = []
        for target in self.targets:
            values = self.ratios(target)
            ratio = statistics.median(values)
            is_met = None if target.at_most is None else ratio <= target.at_most
            targets.append({**asdict(target), "ratio": ratio, "rounds": values, "is_met": is_met})
        tokens = {name: runs[0].token_ids for name, runs in self.results.items()}
        first = next(iter(tokens.values()))
        return {
            "title": self.title,
            "model": self.loaded.name,
            "environment": environment(engine),
            "workload": describe_work(self.title, self.items, self.seed),
            "engines": {name: asdict(each.config) for name, each in self.engines.items()},
            "columns": dict(self.columns),
            "rounds": {
                name: [run.figures() for run in runs] for name, runs in self.results.items()
            },
            "targets": targets,
            "same_tokens": {
                name: sum(map(list.__eq__, first, other)) for name, other in tokens.items()
            },
        }


class LockstepContest(Contest):
    """A contest of engines that plan the same steps: they take turns at every step of the work.

    A slow moment of the machine, which a run may have and the next not, hits all of them. Their KV
    caches go round, for where a tensor happens to lie may be worth more than what is measured.
    """

    def run(self, rounds: int) -> None:
        """Warm up, then the rounds."""
        self._round(0, short_work(self.items))
        self.results = {name: [] for name in self.engines}
        for number in range(1, rounds + 1):
            for name, result in self._round(number, self.items).items():
                self.results[name].append(result)
            times = ", ".join(
                f"{name} {runs[-1].seconds:.2f} s" for name, runs in self.results.items()
            )
            log_console.print(f"round {number}/{rounds}  {times}")

    def _round(self, number: int, items: Sequence[WorkItem]) -> dict[str, RunResult]:
        engines = list(self.engines.values())
        runners = [engine.runner for engine in engines]
        for engine, runner in zip(engines, runners[1:] + runners[:1], strict=True):
            engine.runner, engine.tracer = runner, Tracer()
        runs = [LockstepRun(engine, items) for engine in engines]
        turn = number
        while any(run.engine.has_unfinished_requests() for run in runs):
            turn += 1
            for index in range(len(runs)):
                runs[(index + turn) % len(runs)].step()
        return {
            name: run.result(self.figures) for name, run in zip(self.engines, runs, strict=True)
        }


class LockstepRun:
    """One engine's part of a round: its own clock runs only while it is its turn."""

    def __init__(self, engine: Any, items: Sequence[WorkItem]) -> None:
        if hasattr(engine, "reset_prefix_cache"):
            engine.reset_prefix_cache()
        self.engine = engine
        self.ids = [engine.add_request(item.prompt, item.params) for item in items]
        self.step_seconds: list[float] = []
        self.cpu_seconds = 0.0
        self.token_times: dict[str, list[float]] = {request_id: [] for request_id in self.ids}
        self.outputs: dict[str, RequestOutput] = {}

    def step(self) -> None:
        """One step, timed."""
        if not self.engine.has_unfinished_requests():
            return
        start, cpu_start = time.perf_counter(), time.process_time()
        outputs = self.engine.step()
        self.step_seconds.append(time.perf_counter() - start)
        self.cpu_seconds += time.process_time() - cpu_start
        now = sum(self.step_seconds)
        for output in outputs:
            self.outputs[output.request_id] = output
            self.token_times[output.request_id].append(now)

    def result(self, figures: FigureMaker) -> RunResult:
        """What the engine did."""
        outputs = [self.outputs[request_id] for request_id in self.ids]
        records = self.engine.tracer.records
        return RunResult(
            seconds=sum(self.step_seconds),
            token_ids=[output.token_ids for output in outputs],
            token_times=[self.token_times[request_id] for request_id in self.ids],
            facts={
                "steps": len(records),
                "step_p50": 1e3 * statistics.median(self.step_seconds),
                **figures(outputs, records),
            },
            cpu_seconds=self.cpu_seconds,
        )


def build_engine(
    args: argparse.Namespace, loaded: LoadedModel, items: Sequence[WorkItem], **fields: Any
) -> LLMEngine:
    """An engine with room for all of these requests."""
    longest = max(len(item.prompt) + item.params.max_tokens for item in items)
    fields = {
        "max_num_seqs": args.max_num_seqs or len(items),
        "max_num_batched_tokens": args.max_num_batched_tokens,
        "max_model_len": args.max_model_len or longest,
        **config_fields(args.set),
        **fields,
    }
    return LLMEngine(loaded.model, tokenizer=loaded.tokenizer, **fields)
