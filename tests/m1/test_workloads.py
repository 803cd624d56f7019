"""Workloads are the same everywhere for a seed, and `serve` adds each item when its time comes."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

import m1_single
import m2_batching
from helpers.engines import (
    VOCAB_SIZE,
    assert_empty,
    every_milestone,
    greedy,
    hf_greedy,
    make_engine,
    random_prompts,
)
from milestone_llm.lab.bench.workloads import (
    WORKLOADS,
    WorkItem,
    nano,
    random_tokens,
    serve,
    with_poisson_arrivals,
)

PROMPTS = random_prompts([5, 3, 7])


def test_nano_is_the_public_benchmark_with_its_133966_output_tokens():
    items = nano(151936)
    assert len(items) == 256
    assert sum(item.params.max_tokens for item in items) == 133_966
    assert all(100 <= len(item.prompt) <= 1024 for item in items)
    assert {item.params.temperature for item in items} == {0.6}


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_follows_its_seed_and_its_sizes(name):
    sizes = {"num_requests": 5, "input_len": (2, 4), "output_len": (3, 3)}
    items = WORKLOADS[name](VOCAB_SIZE, seed=1, **sizes)
    assert items == WORKLOADS[name](VOCAB_SIZE, seed=1, **sizes)
    assert items != WORKLOADS[name](VOCAB_SIZE, seed=2, **sizes)
    assert {item.params.max_tokens for item in items} == {3}
    assert {len(item.prompt) for item in items} <= {2, 3, 4}
    assert len({item.params.seed for item in items}) == 5


def test_poisson_arrivals_have_the_rate_asked_for_and_leave_the_work_as_it_is():
    items = random_tokens(2000, (1, 1), (1, 1), vocab_size=VOCAB_SIZE)
    arriving = with_poisson_arrivals(items, rate=4.0, seed=1)
    times = [item.arrival_time for item in arriving]
    assert (times[0], times) == (0, sorted(times))
    assert times[-1] == pytest.approx(2000 / 4.0, rel=0.1)
    assert [replace(item, arrival_time=0.0) for item in arriving] == items


@every_milestone
def test_serve_adds_items_at_their_steps_and_gives_outputs_in_their_order(package):
    engine = make_engine(package, trace="memory")
    engine.add_request(PROMPTS[1], greedy(2), request_id="another's")
    steps = [6, 0, 2]
    items = [
        WorkItem(prompt, greedy(4), arrival_step=step)
        for prompt, step in zip(PROMPTS, steps, strict=True)
    ]
    outputs = serve(engine, items)
    assert [output.token_ids for output in outputs] == [hf_greedy("llama", p, 4) for p in PROMPTS]
    first_seen: dict[str, int] = {}
    for record in engine.tracer.records:
        for name in [*record.admitted, *record.waiting]:
            first_seen.setdefault(name, record.step)
    assert [first_seen[output.request_id] for output in outputs] == steps
    assert_empty(engine)


def test_serve_skips_steps_without_work_waits_for_times_and_shows_each_step():
    engine, seen = make_engine(m2_batching), []
    items = [
        WorkItem(PROMPTS[0], greedy(1)),
        WorkItem(PROMPTS[1], greedy(1), arrival_step=10**9),
        WorkItem(PROMPTS[2], greedy(2), arrival_time=0.05),
    ]
    start = time.perf_counter()
    outputs = serve(engine, items, on_step=lambda outputs: seen.append(len(outputs)))
    assert outputs[2].metrics.arrival_time - start >= 0.05
    assert sum(seen) == 4
    assert len(seen) == engine.stats()["steps"] <= 4


def test_serve_that_is_interrupted_or_refuses_an_item_leaves_an_empty_engine():
    engine = make_engine(m1_single)

    def interrupt(outputs: list) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        serve(engine, [WorkItem(prompt, greedy(3)) for prompt in PROMPTS], on_step=interrupt)
    assert_empty(engine)
    with pytest.raises(ValueError, match="prompt is empty"):
        serve(engine, [WorkItem(PROMPTS[0], greedy(3)), WorkItem([], greedy(3))])
    assert_empty(engine)
