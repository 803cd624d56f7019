"""Run a setting with the engines' scheduler, KV manager, core and tracer, but without a model.

Tokens follow a rule, and the clock advances by the time that a step would take. So a minute of an
engine takes milliseconds, and is the same in every run.
"""

from __future__ import annotations

import importlib
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from milestone_llm.core.errors import InputError
from milestone_llm.core.outputs import EngineCoreOutput, SampledToken
from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.core.request import Request
from milestone_llm.core.scheduler import BaseScheduler
from milestone_llm.frontend.custom_scheduler import place_of
from milestone_llm.frontend.engine_driver import EngineDriver
from milestone_llm.frontend.input_processor import InputProcessor
from milestone_llm.frontend.inputs import check_priority
from milestone_llm.frontend.step_log import LoggedStep, StepLog
from milestone_llm.lab.explorer.kv_figures import kv_figures
from milestone_llm.lab.explorer.positions import useful_share
from milestone_llm.trace.records import StepRecord
from milestone_llm.trace.tracer import Tracer

from .gpus import machine_named
from .machine import Machine
from .setting import (
    ENGINES,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    RequestSpec,
    Setting,
    config_class,
    defaults_of,
)

MAX_STEPS, MAX_ROWS, MAX_BLOCKS = 5_000, 40_000, 100_000
"""Limits of a run, so that one need not wait for it."""

FIGURES = {
    "ttft": "TTFT, mean, s",
    "ttft_max": "TTFT, longest, s",
    "tpot": "TPOT, mean, ms",
    "pause": "longest pause, ms",
    "makespan": "all done after, s",
    "tok_s": "output tokens/s",
    "steps": "steps",
    "vain": "computed in vain, %",
    "kv_empty": "KV kept empty, %",
    "preemptions": "preemptions",
    "cached": "cached tokens",
}


class RuleRunner:
    """Samples tokens from the number of tokens that their request has."""

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Return a token for each row that samples."""
        due = [request for row in plan.rows for request in row.sampling_requests]
        tokens = {each.request_id: [SampledToken(each.num_tokens % VOCAB_SIZE)] for each in due}
        return LaunchedStep(lambda: tokens)

    def reset(self) -> None:
        """Do nothing: a step leaves no state."""


class FinishReasons:
    """Takes the outputs of a run: nothing is made of them except that requests end."""

    def process(self, outputs: Sequence[EngineCoreOutput]) -> dict[str, str]:
        """Return the finish reason of each request that has ended, by id."""
        return {each.request_id: each.finish_reason for each in outputs if each.finish_reason}

    def repair(self) -> dict[str, int]:
        """Return no requests: after an error, none goes on."""
        return {}


@dataclass
class SimulatedClock:
    """Computes how long each step took, and tells the tracer."""

    machine: Machine
    block_size: int
    tracer: Tracer
    now: float
    """Time in seconds."""

    def record(self, step: LoggedStep, scheduler: BaseScheduler) -> None:
        """Advance by the duration of a step."""
        end = self.now + self.machine.seconds(step.plan, self.block_size)
        self.tracer.record(replace(step, times=[self.now, self.now, end, end]), scheduler)
        self.now = end


@dataclass
class Outcome:
    """The result of a side."""

    label: str
    milestone: str
    budget: int | None = None
    records: list[StepRecord] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    step: int | None = None
    """Number of the last step that was begun."""
    problem: str = ""
    """Why the run ended early, or did not begin."""
    where: str = ""
    """File, line and its text, if the problem is in code."""


class OwnScheduler(Protocol):
    """A version of the reader's file, which replaces a milestone's scheduler."""

    def run(self, setting: Setting, index: int) -> Outcome:
        """Run a side of the setting."""


Own = Mapping[str, OwnScheduler]  # by `Side.engine`
NO_OWN: Own = {}


def run_setting(setting: Setting, own: Own = NO_OWN) -> list[Outcome]:
    """Run each side to its end, or to its first error."""
    return [
        own[side.engine].run(setting, index)
        if side.engine in own
        else run_side(setting, index, side.engine)
        for index, side in enumerate(setting.sides)
    ]


def run_side(
    setting: Setting,
    index: int,
    milestone: str,
    scheduler: type[BaseScheduler] | BaseException | None = None,
    folder: Path | None = None,
) -> Outcome:
    """Run one side.

    Args:
        scheduler: replaces the milestone's; an exception if the file could not be loaded.
        folder: the reader's folder: an error in its files is reported with its line.
    """
    outcome = Outcome(setting.labels()[index], milestone)
    try:
        if isinstance(scheduler, BaseException):
            raise scheduler
        _run(setting, setting.sides[index].fields, outcome, scheduler)
    except InputError as error:
        outcome.problem = str(error)
    except BaseException as error:
        if folder is None and not isinstance(error, Exception):
            raise  # Ctrl-C in the terminal of the page's server
        outcome.problem = f"{type(error).__name__}: {error}".removesuffix(": ")
        outcome.where = place_of(error, folder)
    if outcome.records:
        outcome.figures = figures_of(outcome.records, setting.in_order())
    return outcome


def _run(
    setting: Setting,
    fields: Mapping[str, Any],
    outcome: Outcome,
    scheduler_class: type[BaseScheduler] | None,
) -> None:
    machine = machine_named(setting.machine)
    windows = setting.windows()
    scheduler, config = assemble(fields, outcome.milestone, scheduler_class, windows)
    coming = deque(_requests_for(scheduler, setting.in_order()))
    clock = SimulatedClock(machine, getattr(config, "block_size", 1), Tracer(), now=coming[0][0])
    outcome.records, outcome.budget = clock.tracer.records, config.max_num_batched_tokens
    log = StepLog(outcome.milestone, scheduler, clock, check_invariants=scheduler_class is not None)
    driver, num_rows = EngineDriver(scheduler, RuleRunner(), log), 0
    driver.attach(FinishReasons())
    while coming or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            clock.now = max(clock.now, coming[0][0])  # nothing happens until then
        while coming and coming[0][0] <= clock.now:
            driver.run(driver.add, coming.popleft()[1])
        outcome.step = len(outcome.records)
        driver.run(driver.step)
        num_rows += len(outcome.records[-1].batch)
        if len(outcome.records) >= MAX_STEPS or num_rows > MAX_ROWS:
            most = f"{MAX_STEPS:,} steps and {MAX_ROWS:,} rows"
            raise InputError(f"stopped: the playground computes at most {most} of a run")


def assemble(
    given: Mapping[str, Any],
    milestone: str,
    own: type[BaseScheduler] | None = None,
    windows: Sequence[int | None] = (),
) -> tuple[BaseScheduler, Any]:
    """Return a scheduler and its config, as the engine of a milestone builds them.

    Args:
        own: replaces the milestone's scheduler.
        windows: of the layers of M4's model; all see all tokens if there are none.

    Raises:
        InputError: errors of the engine's config, or more rows or blocks than a page can show.
    """
    if milestone not in ENGINES:
        hint = "your own wants --scheduler PATH"
        raise InputError(f"engine must be one of {', '.join(ENGINES)}, got {milestone!r}; {hint}")
    later = defaults_of("m4_prefix_chunked").keys() - defaults_of(milestone).keys()
    fields = {name: value for name, value in given.items() if name not in later}
    config = config_class(milestone).from_fields(**fields)
    scheduler_class = own or importlib.import_module(f"{milestone}.scheduler").Scheduler
    length, pool = config.resolve_max_model_len(MAX_MODEL_LEN), []
    groups = None
    sizes = [config.max_num_seqs]
    if "block_size" in defaults_of(milestone):
        num_blocks = config.max_num_seqs * -(-length // config.block_size)
        if config.kv_cache_tokens is not None:
            num_blocks = config.kv_cache_tokens // config.block_size
        if windows and milestone == "m4_prefix_chunked":
            hybrid = importlib.import_module("m4_prefix_chunked.hybrid.hybrid_cache")
            groups = hybrid.LayerGroups.of_windows(windows)
            groups = groups.usable(config, length, scheduler_class)
        num_blocks_for = partial(groups.num_whole_blocks_for, config) if groups else None
        length = config.length_that_fits(length, num_blocks, num_blocks_for)
        pool = [num_blocks]
        sizes += [num_blocks, config.num_host_blocks(num_blocks)]
    if max(sizes) > MAX_BLOCKS:
        raise InputError(f"here are at most {MAX_BLOCKS:,} rows and blocks, got {max(sizes):,}")
    if groups and groups.has_windows and groups.fits(config, length, *pool):
        num_blocks = groups.num_blocks(*pool)
        scheduler = hybrid.grouped_scheduler(scheduler_class, config, length, num_blocks, groups)
        return scheduler, config
    return scheduler_class(config, length, *pool), config


def _requests_for(
    scheduler: BaseScheduler, specs: Sequence[RequestSpec]
) -> list[tuple[float, list[Request]]]:
    """Return each request's arrival time and completions, checked as an engine does it."""
    limits, validate = (VOCAB_SIZE, scheduler.max_model_len), scheduler.validate
    processor = InputProcessor(None, *limits, frozenset(), 0, lambda name: False, validate)
    requests = []
    for index, spec in enumerate(specs):
        try:
            item = spec.item(index)
            check_priority(item.priority)
            token_ids, params = processor.encode(item.prompt, item.params, chat=False)
            completions = processor.make(token_ids, params, None, item.priority)
        except InputError as error:
            raise InputError(f"r{index}: {error}") from None
        requests.append((spec.arrival, completions))
    return requests


def figures_of(records: Sequence[StepRecord], specs: Sequence[RequestSpec]) -> dict[str, float]:
    """Return the figures of a run, or of its beginning, by their names in `FIGURES`."""
    tokens: dict[str, list[float]] = {}  # times of each request's tokens
    num_cached = 0
    for record in records:
        end = record.start_s + record.execute_ms / 1e3
        for row in record.batch:
            num_cached += row.num_cached_tokens if row.request_id in record.admitted else 0
            if row.sampled_token is not None:
                tokens.setdefault(row.request_id, []).append(end)
    arrivals = {f"r{index}": spec.arrival - specs[0].arrival for index, spec in enumerate(specs)}
    ttfts = [times[0] - arrivals[name] for name, times in tokens.items()]
    tpots = [(times[-1] - times[0]) / (len(times) - 1) for times in tokens.values() if times[1:]]
    pauses = [after - before for times in tokens.values() for before, after in pairwise(times)]
    kv = kv_figures(records)
    return {
        "ttft": statistics.fmean(ttfts or [0]),
        "ttft_max": max(ttfts, default=0),
        "tpot": 1e3 * statistics.fmean(tpots or [0]),
        "pause": 1e3 * max(pauses, default=0),
        "makespan": end,
        "tok_s": sum(map(len, tokens.values())) / end if end else 0,
        "steps": len(records),
        "vain": 100 * (1 - useful_share(records)),
        "kv_empty": 100 * kv["waste_share"],
        "preemptions": kv["num_preemptions"],
        "cached": num_cached,
    }
