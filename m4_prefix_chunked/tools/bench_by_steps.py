"""Rounds of engines that plan the same steps: they take turns at every step of the work.

A slow moment of the machine, which a run may have and the next not, hits all of them. Their KV
caches go round, for where a tensor happens to lie may be worth more than what is measured.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from milestone_llm.lab.bench.measure import (
    Contestant,
    RunResult,
    log_round,
    percentile,
    prepare,
    short_work,
)
from milestone_llm.lab.bench.workloads import WorkItem
from milestone_llm.frontend.outputs import RequestOutput
from milestone_llm.threads import ThreadWatch


def measure_by_steps(
    contestants: Sequence[Contestant], items: Sequence[WorkItem], rounds: int
) -> dict[str, list[RunResult]]:
    """`bench.measure.measure`, with turns at every step."""
    ThreadWatch(contestants[0].engine.model.device.type)
    _round(0, contestants, short_work(items))
    results: dict[str, list[RunResult]] = {each.name: [] for each in contestants}
    for number in range(1, rounds + 1):
        for name, result in _round(number, contestants, items).items():
            results[name].append(result)
            log_round(number, rounds, name, result)
    return results


def _round(
    number: int, contestants: Sequence[Contestant], items: Sequence[WorkItem]
) -> dict[str, RunResult]:
    engines = [each.engine for each in contestants]
    runners = [engine.runner for engine in engines]
    for engine, runner in zip(engines, runners[1:] + runners[:1], strict=True):
        engine.runner = runner
    runs = [Run(each, items) for each in contestants]
    turn = number
    while any(run.engine.has_unfinished_requests() for run in runs):
        turn += 1
        for index in range(len(runs)):
            runs[(index + turn) % len(runs)].step()
    return {run.contestant.name: run.result() for run in runs}


class Run:
    """One engine's part of a round: its own clock runs only while it is its turn."""

    def __init__(self, contestant: Contestant, items: Sequence[WorkItem]) -> None:
        self.contestant, self.engine = contestant, contestant.engine
        prepare(self.engine, is_traced=True)
        self.ids = [self.engine.add_request(item.prompt, item.params) for item in items]
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

    def result(self) -> RunResult:
        """What the engine did."""
        outputs = [self.outputs[request_id] for request_id in self.ids]
        records = self.engine.tracer.records
        own = self.contestant.facts(outputs, records) if self.contestant.facts else {}
        return RunResult(
            seconds=sum(self.step_seconds),
            token_ids=[output.token_ids for output in outputs],
            token_times=list(self.token_times.values()),
            facts={
                "steps": len(records),
                "step_p50": 1e3 * percentile(self.step_seconds, 50),
                **own,
            },
            cpu_seconds=self.cpu_seconds,
        )
