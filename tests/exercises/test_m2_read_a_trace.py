"""Checks exercises/m2_read_a_trace.py."""

import functools
import random
from itertools import pairwise

import pytest

import m1_single.scheduler
import m2_batching.scheduler
from helpers.schedulers import Life, of_length
from m2_batching import EngineConfig as RegionConfig
from milestone_llm.frontend.config import EngineConfig
from milestone_llm.frontend.step_log import LoggedStep
from milestone_llm.trace.records import StepRecord

EXERCISE = ("m2_read_a_trace.py", "latencies")

NUM_REQUESTS = 24
SCHEDULERS = {
    "m1_single": lambda: m1_single.scheduler.Scheduler(EngineConfig(max_num_seqs=4), 256),
    "m2_batching": lambda: m2_batching.scheduler.Scheduler(RegionConfig(max_num_seqs=4), 256),
}


@functools.cache
def trace_of(milestone):
    """24 requests that come over 1.2 s; a step takes 10 ms, and 0.25 ms a position.

    Returns:
        The records, and for each request the times of its arrival and of its tokens, in ms.
    """
    life, rng = Life(scheduler=SCHEDULERS[milestone]()), random.Random(3)
    scheduler = life.scheduler
    coming = sorted((rng.uniform(0, 1.2), number) for number in range(NUM_REQUESTS))
    records, arrival_ms, token_ms, now = [], {}, {}, 0.0
    while coming or scheduler.has_unfinished_requests():
        if not scheduler.has_unfinished_requests():
            now = max(now, coming[0][0])  # nobody is there: the engine waits
        arrived = []
        while coming and coming[0][0] <= now:
            number = coming.pop(0)[1]
            sizes = rng.randint(4, 90), rng.choice((1, 5, 12, 20))
            life.add(of_length(f"r{number}", *sizes))
            arrived.append(f"r{number}")
        plan = scheduler.schedule()
        sampled = life.device.run(plan)
        scheduler.update(plan, sampled)
        execute_s = 0.010 + 0.00025 * (plan.num_tokens + plan.num_padding_tokens)
        times = [now, now + 0.002, now + 0.002 + execute_s, now + 0.003 + execute_s]
        step = LoggedStep(plan, times, arrived, [], sampled, len(records), milestone)
        records.append(StepRecord.of(step, scheduler, 0.0).to_dict())
        arrival_ms.update(dict.fromkeys(arrived, now * 1e3))
        now = times[-1]
        for name in sampled:
            token_ms.setdefault(name, []).append(now * 1e3)
    return records, arrival_ms, token_ms


def wanted(milestone):
    _, arrival_ms, token_ms = trace_of(milestone)
    result = {}
    for name, times in token_ms.items():
        gaps = [times[place] - times[place - 1] for place in range(1, len(times))]
        result[name] = times[0] - arrival_ms[name], max(gaps) if gaps else None
    return result


def from_admission(records):
    """As if requests came when they are admitted, and had their tokens when a step begins."""
    begun, tokens = {}, {}
    for record in records:
        for name in record["admitted"]:
            begun[name] = record["start_s"] * 1e3
        for row in record["batch"]:
            if row["sampled_token"] is not None:
                tokens.setdefault(row["request_id"], []).append(record["start_s"] * 1e3)
    return {
        name: (times[0] - begun[name], max((b - a for a, b in pairwise(times)), default=None))
        for name, times in tokens.items()
    }


WRONG, TOLD = from_admission, "the TTFT of 24 requests of 24 is wrong"


@pytest.mark.parametrize("milestone", SCHEDULERS)
def test_latencies(exercise, milestone):
    given, right = exercise(trace_of(milestone)[0]), wanted(milestone)
    assert set(given) == set(right), (
        f"{milestone}: these requests are missing or too many: {set(given) ^ set(right)}"
    )
    for what, place in (("TTFT", 0), ("longest ITL", 1)):
        close = {name: pytest.approx(right[name][place], abs=0.1) for name in right}
        wrong = [name for name in right if given[name][place] != close[name]]
        assert not wrong, (
            f"{milestone}: the {what} of {len(wrong)} requests of {len(right)} is wrong. That of "
            f"{wrong[0]} is {right[wrong[0]][place]} ms, yours is {given[wrong[0]][place]}."
        )


def test_a_trace_without_steps(exercise):
    assert exercise([]) == {}


def test_what_continuous_batching_changes(exercise, figure):
    given = exercise(trace_of("m2_batching")[0])
    for place, what in enumerate(("longest TTFT", "longest ITL")):
        value, before = (
            max(each[place] or 0.0 for each in latencies.values())
            for latencies in (given, wanted("m1_single"))
        )
        figure(f"{what} in M2, M1 before", f"{value:,.0f} ms", f"{before:,.0f} ms")
        assert value > 0
