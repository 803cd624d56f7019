"""Iteration-level scheduling under random work: every plan keeps every rule, nobody is dropped."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import FakeRunner, make_request
from m2_batching.config import EngineConfig
from m2_batching.scheduler import Scheduler
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request, RequestStatus


def check_step(scheduler: Scheduler, plan: StepPlan, waiting_before: list[Request]) -> None:
    """What must hold of any plan, given who waited when it was made."""
    config = scheduler.config
    assert plan.rows, "a step computes something"
    assert plan.num_tokens <= config.max_num_batched_tokens
    assert len(plan.rows) <= config.max_num_seqs
    assert len({row.request.request_id for row in plan.rows}) == len(plan.rows)
    regions = [region for row in plan.rows for region in row.blocks]
    assert len(set(regions)) == len(plan.rows), "one region each"
    assert plan.admitted == waiting_before[: len(plan.admitted)], "from the head of the queue"
    assert [row.request for row in plan.rows][len(plan.rows) - len(plan.admitted) :] == (
        plan.admitted
    ), "running requests first"
    left_over = waiting_before[len(plan.admitted) :]
    if left_over and len(plan.rows) < config.max_num_seqs:  # admission is greedy
        assert plan.num_tokens + left_over[0].num_tokens > config.max_num_batched_tokens


def run_random_work(
    scheduler: Scheduler,
    arrivals: Mapping[int, Sequence[Request]],
    aborts: Mapping[int, Sequence[Request]],
) -> int:
    """Serve arrivals with aborts in between, checking every step; the number of steps."""
    runner, num_arrived, num_steps = FakeRunner(), 0, 0
    last = max([*arrivals, *aborts], default=0)
    step = 0
    while step <= last or scheduler.has_unfinished_requests():
        for request in arrivals.get(step, ()):
            request.arrival, num_arrived = num_arrived, num_arrived + 1
            scheduler.add(request)
        for request in aborts.get(step, ()):
            if request.arrival >= 0 and not request.is_finished:
                scheduler.finish(request, "abort")
        if scheduler.has_unfinished_requests():
            before, running = list(scheduler.waiting), list(scheduler.running)
            plan = scheduler.schedule()
            check_step(scheduler, plan, before)
            assert {row.request for row in plan.rows} >= set(running), "no running row is skipped"
            scheduler.update(plan, runner.run(plan))
            scheduler.check_invariants()
            num_steps += 1
        step += 1
        assert step < 5000, "work comes to an end"
    return num_steps


def assert_all_served(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    for request in requests:
        assert request.status is RequestStatus.FINISHED
        if request.finish_reason == "length":
            assert request.num_output_tokens == min(
                request.sampling_params.max_tokens,
                scheduler.max_model_len - request.num_prompt_tokens,
            )
    assert scheduler.kv_usage().free == scheduler.config.max_num_seqs, "every region is back"
    assert sorted(scheduler.kv.free_regions) == list(range(scheduler.config.max_num_seqs))


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_thousands_of_random_steps_keep_every_rule(policy):
    rng, num_steps = random.Random(policy), 0
    for _ in range(80):
        max_num_seqs = rng.randint(1, 6)
        config = EngineConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=rng.randint(16, 40), policy=policy
        )
        scheduler = Scheduler(config, max_model_len=32)
        requests = [
            make_request(
                f"q{n}",
                rng.randint(1, 16),
                rng.randint(1, 20),
                arrival=-1,
                priority=rng.randint(0, 3),
            )
            for n in range(30)
        ]
        arrivals: dict[int, list[Request]] = {}
        aborts: dict[int, list[Request]] = {}
        for request in requests:
            arrivals.setdefault(rng.randint(0, 60), []).append(request)
        for request in rng.sample(requests, 5):
            aborts.setdefault(rng.randint(0, 100), []).append(request)
        num_steps += run_random_work(scheduler, arrivals, aborts)
        assert_all_served(scheduler, requests)
    assert num_steps > 4000


@settings(max_examples=50)
@given(
    st.lists(
        st.tuples(st.integers(0, 12), st.integers(1, 8), st.integers(1, 6), st.integers(-1, 1)),
        max_size=12,
    ),
    st.integers(1, 4),
    st.integers(8, 16),
    st.sampled_from(["fcfs", "priority"]),
)
def test_any_arrivals_keep_every_rule(work, max_num_seqs, budget, policy):
    config = EngineConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, policy=policy)
    scheduler = Scheduler(config, max_model_len=10)
    arrivals: dict[int, list[Request]] = {}
    for number, (step, num_prompt_tokens, max_tokens, priority) in enumerate(work):
        request = make_request(f"q{number}", num_prompt_tokens, max_tokens, priority=priority)
        arrivals.setdefault(step, []).append(request)
    run_random_work(scheduler, arrivals, {})
    assert_all_served(scheduler, [request for group in arrivals.values() for request in group])
