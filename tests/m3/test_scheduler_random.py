"""Thousands of random steps against the device of lists, with invariants on after each.

Whatever arrives, forks, is preempted, swapped, aborted or fails, and wherever it is interrupted: at
every step every request finds its own context, it gets the tokens it would have got alone, and
every block comes back.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m3_paged.scheduler import Scheduler
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request, RequestStatus
from paged_helpers import (
    PagedDevice,
    completions,
    expected_tokens,
    is_done,
    make_requests,
    make_scheduler,
)

NUM_STEPS = 2_500  # in each of four modes


class RandomLife:
    """A scheduler to which random things happen."""

    def __init__(self, rng: random.Random, *, failure_rate: float = 0.02, **fields: str) -> None:
        self.rng, self.failure_rate = rng, failure_rate
        self.block_size = rng.choice([1, 2, 3, 4, 16])
        max_model_len = rng.randint(2, 40)
        num_blocks = -(-max_model_len // self.block_size) + rng.choice([0, 0, 1, 3, 20])
        self.scheduler: Scheduler = make_scheduler(
            num_blocks,
            self.block_size,
            max_model_len,
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=max_model_len + 8 + rng.choice([0, 0, 30]),
            swap_space_tokens=rng.choice([None, 0, self.block_size, 2 * max_model_len]),
            **fields,
        )
        self.device = PagedDevice(self.scheduler)
        self.leaders: list[Request] = []
        self.num_steps = self.num_arrivals = self.num_preemptions = self.num_swaps = 0

    def arrive(self) -> None:
        scheduler, rng = self.scheduler, self.rng
        leader = make_requests(
            f"r{self.num_arrivals}",
            rng.randint(1, scheduler.max_model_len - 1),
            rng.randint(1, 30),
            n=rng.randint(1, min(4, scheduler.config.max_num_seqs)),
            seed=rng.randrange(100),
            priority=rng.randint(0, 2),
            arrival=self.num_arrivals,
        )
        self.num_arrivals += 1
        scheduler.validate(leader)
        scheduler.add(*completions(leader))
        self.leaders.append(leader)

    def abort_somebody(self) -> None:
        leader = self.rng.choice(self.leaders)
        own = list(reversed(completions(leader)))  # forks before what they fork from
        if self.rng.random() < 0.3:
            own = own[:1]  # only the last one
        for completion in own:
            if not completion.is_finished:
                self.scheduler.finish(completion, "abort")
        self.scheduler.check_invariants()

    def interrupt(self) -> None:
        """Ctrl-C, before or after a step is planned. Nobody ends; all KV is computed again."""
        if self.rng.random() < 0.5:
            self.scheduler.schedule()
        requests = [request for leader in self.leaders for request in completions(leader)]
        known = [list(request.token_ids) for request in requests]
        self.scheduler.restart(requests)
        self.device.reset()
        self.check_all_wait()
        assert known == [request.token_ids for request in requests]

    def step(self) -> None:
        scheduler = self.scheduler
        seniors = scheduler.by_seniority()
        plan = scheduler.schedule()
        self.check_plan(plan, seniors)
        due = [request for row in plan.rows for request in row.sampling_requests]
        if self.rng.random() < self.failure_rate:
            scheduler.fail(plan)
            self.device.reset()
            self.check_all_wait()
            assert {request.finish_reason for request in due} == {"error"}
        else:
            sampled = self.device.run(plan)
            broken = [self.rng.choice(due)] if self.rng.random() < self.failure_rate else []
            sampled |= {request.request_id: [SampledToken(-1)] for request in broken}
            scheduler.update(plan, sampled)
            errors = [request for request in due if request.finish_reason == "error"]
            assert errors == broken
        scheduler.check_invariants()
        self.num_steps += 1
        self.num_preemptions += len(plan.preempted)
        self.num_swaps += len(plan.swap_ins)
        scheduler.drain_events()
        for leader in self.leaders:
            if is_done(leader):
                for request in completions(leader):
                    self.check_output(request)
        self.leaders = [each for each in self.leaders if not is_done(each)]

    def check_all_wait(self) -> None:
        """What must hold once all KV memory has been given back."""
        self.scheduler.check_invariants()
        assert self.scheduler.running == []
        assert {request.status for request in self.scheduler.waiting} <= {RequestStatus.WAITING}
        assert self.scheduler.kv.pool.num_used == 0
        assert self.scheduler.preempter.host.pool.num_used == 0

    def check_plan(self, plan: StepPlan, seniors: list[Request]) -> None:
        """What must hold of every plan."""
        scheduler = self.scheduler
        due = [request for row in plan.rows for request in row.sampling_requests]
        newcomers = plan.admitted + plan.resumed
        assert plan.rows, "unfinished requests, and nothing planned"
        assert set(due) == set(scheduler.running), "every running request takes part, once"
        assert len(due) == len(set(due)) <= scheduler.config.max_num_seqs
        assert plan.num_tokens <= scheduler.config.max_num_batched_tokens
        if plan.preempted:
            assert not newcomers
            assert seniors[0] not in [preemption.request for preemption in plan.preempted]
        if newcomers and scheduler.waiting:
            last = max(scheduler.waiting.key(request) for request in newcomers)
            assert last <= min(scheduler.waiting.key(request) for request in scheduler.waiting)

    def check_output(self, request: Request) -> None:
        """Complete or cut short, it is what the request would have got alone."""
        params, limit = request.sampling_params, self.scheduler.max_model_len
        full = min(params.max_tokens, limit - request.num_prompt_tokens)
        tokens = request.output_token_ids
        assert tokens == expected_tokens(request, len(tokens))
        assert request.finish_reason in ("length", "abort", "error")
        assert len(tokens) == full or request.finish_reason != "length"

    def drain(self) -> None:
        """Let all that is there finish, and look that nothing is left."""
        num_left = sum(len(completions(leader)) for leader in self.leaders)
        limit = self.num_steps + 40 * num_left  # as if they ran one after the other
        while self.scheduler.has_unfinished_requests():
            self.step()
            assert self.num_steps <= limit, "no progress"
        assert self.leaders == [], "requests dropped"
        assert self.scheduler.kv.pool.num_used == self.scheduler.preempter.host.pool.num_used == 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_ten_thousand_random_steps_lose_no_block_and_no_token(preemption, policy):
    rng = random.Random(f"{preemption} {policy}")
    num_steps = num_preemptions = num_swaps = num_copies = num_aborts = num_interrupts = 0
    while num_steps < NUM_STEPS:
        life = RandomLife(rng, preemption=preemption, policy=policy)
        while life.num_steps < 100:
            if rng.random() < 0.4:
                life.arrive()
            if life.leaders and rng.random() < 0.05:
                life.abort_somebody()
                num_aborts += 1
            if rng.random() < 0.025:
                life.interrupt()
                num_interrupts += 1
            if life.scheduler.has_unfinished_requests():
                life.step()
        life.drain()
        num_steps += life.num_steps
        num_preemptions += life.num_preemptions
        num_swaps += life.num_swaps
        num_copies += life.scheduler.kv.num_copies
    # The road led through what it was built for.
    assert min(num_preemptions, num_copies) > 60
    assert min(num_aborts, num_interrupts) > 20
    assert (num_swaps > 30) == (preemption == "swap")


@settings(max_examples=60)
@given(
    rng=st.randoms(use_true_random=False),
    num_requests=st.integers(1, 12),
    preemption=st.sampled_from(["recompute", "swap"]),
    policy=st.sampled_from(["fcfs", "priority"]),
)
def test_any_workload_finishes(rng, num_requests, preemption, policy):
    """The same, in small, so that a failure shrinks to a few requests."""
    life = RandomLife(rng, failure_rate=0, preemption=preemption, policy=policy)
    for _ in range(num_requests):
        life.arrive()
    life.drain()
