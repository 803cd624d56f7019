"""M4's schedule one step ahead of the tokens: plan n + 1 is made before the tokens of n are known.

The same arrivals and aborts are served twice, once with every step settled at once and once a step
late. Requests stop at random, share prefixes, fork, are preempted, swapped and aborted while a
token of theirs is on its way. The runner reads all KV back at every step, and whatever the order of
things, everybody gets the same tokens.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.models.tiny_models import VOCAB_SIZE
from prefix_helpers import make_scheduler, request_of
from read_back import ReadBackRunner, right_output

NUM_SCRIPTS = 12


@dataclass
class Script:
    """What happens to a scheduler, by step, however its steps are settled."""

    limits: dict[str, Any]
    arrivals: dict[int, list[dict[str, Any]]] = field(default_factory=dict)
    aborts: dict[int, float] = field(default_factory=dict)
    """Where among the unfinished requests, running ones first, somebody is aborted."""
    errors: dict[int, str] = field(default_factory=dict)
    """Who has no token to choose, from this step on."""
    interruptions: set[int] = field(default_factory=set)

    @classmethod
    def draw(cls, seed: int) -> Script:
        """A script of random limits and forty requests."""
        rng = random.Random(seed)
        block_size, max_model_len = rng.choice([1, 2, 4, 8]), rng.randint(12, 40)
        num_blocks = -(-max_model_len // block_size) * rng.choice([2, 3, 4]) // 2
        max_num_seqs = rng.randint(1, 6)
        script = cls(
            {
                "num_blocks": num_blocks,
                "block_size": block_size,
                "max_model_len": max_model_len,
                "max_num_seqs": max_num_seqs,
                "max_num_batched_tokens": rng.choice([2, 7, 16, 100]),
                "long_prefill_token_threshold": rng.choice([0, 0, 3]),
                "prefill_policy": rng.choice(["mixed", "mixed", "prefill_first"]),
                "swap_space_tokens": rng.choice([None, 2 * block_size, max_model_len]),
                "preemption": ("recompute", "swap")[seed % 2],
                "policy": ("fcfs", "priority")[seed // 2 % 2],
            }
        )
        stems = [[rng.randrange(3, VOCAB_SIZE) for _ in range(max_model_len)] for _ in "ab"]
        for number in range(40):
            own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 5))]
            prompt = rng.choice(stems)[: rng.randint(0, max_model_len // 2)] + own
            if rng.random() < 0.3:
                prompt = prompt[: max(1, len(prompt) // block_size * block_size)]
            script.arrivals.setdefault(rng.randrange(60), []).append(
                {
                    "name": f"r{number}",
                    "token_ids": prompt[: max_model_len - 1],
                    "max_tokens": rng.randint(1, 16),
                    "n": rng.randint(1, min(3, max_num_seqs)),
                    "salt": rng.choice(["", "", "", "s"]),
                    "ignore_eos": rng.random() < 0.3,
                    "priority": rng.randint(0, 2),
                }
            )
        names = [f"r{number}" for number in range(40)]
        script.aborts = {rng.randrange(80): rng.random() ** 2 for _ in range(8)}
        script.errors = {rng.randrange(40): rng.choice(names) for _ in range(2)}
        script.interruptions = {rng.randrange(80)}
        return script


class Service:
    """Serves a script, and settles steps `num_ahead` steps after they were launched."""

    def __init__(self, script: Script, num_ahead: int) -> None:
        self.script, self.num_ahead = script, num_ahead
        self.scheduler = make_scheduler(**script.limits)
        self.runner = ReadBackRunner(self.scheduler.config.block_size)
        self.in_flight: deque[tuple[StepPlan, LaunchedStep]] = deque()
        self.leaders: dict[str, Request] = {}
        self.wrong: set[str] = set()
        self.counts: Counter[str] = Counter()

    def run(self) -> None:
        """From the first arrival until nothing is left."""
        step = 0
        while step < 80 or self.scheduler.has_unfinished_requests():
            for arrival in self.script.arrivals.get(step, ()):
                leader = request_of(arrival=len(self.leaders), **arrival)
                self.leaders[leader.request_id] = leader
                self.scheduler.validate(leader)
                self.scheduler.add(leader)
            unfinished = [*self.scheduler.running, *self.scheduler.waiting]
            if step in self.script.aborts and unfinished:
                request = unfinished[int(self.script.aborts[step] * len(unfinished))]
                self.abort(request.leader or request)
            if step in self.script.interruptions:
                self.interrupt()
            self.wrong.add(self.script.errors.get(step, ""))
            if self.scheduler.has_unfinished_requests():
                self.step()
            step += 1
            assert step < 3_000, "no progress"
        while self.in_flight:
            self.settle()
        self.check_nothing_is_left()

    def step(self) -> None:
        """Plan and launch a step, then settle those that are due."""
        plan, num_ahead = self.scheduler.schedule(), self.num_ahead
        if plan.is_empty:
            assert self.in_flight, "unfinished requests, and nothing planned"
            num_ahead = 0
        else:
            self.check_plan(plan)
            self.in_flight.append((plan, self.runner.launch(plan)))
            self.scheduler.mark_launched(plan)
        while len(self.in_flight) > num_ahead:
            self.settle()
        self.scheduler.check_invariants()
        self.scheduler.drain_events()

    def check_plan(self, plan: StepPlan) -> None:
        for row in plan.rows:
            assert row.request.status is RequestStatus.RUNNING
            assert row.end < row.request.max_num_tokens, "its last token is on its way"
        self.counts["steps"] += 1
        self.counts["swaps"] += len(plan.swap_ins)
        self.counts["copies"] += len(plan.copies)
        self.counts["forks"] += sum(len(row.sampling_requests) > 1 for row in plan.rows)
        self.counts["late preemptions"] += sum(
            preemption.request.num_in_flight for preemption in plan.preempted
        )

    def settle(self) -> None:
        plan, launched = self.in_flight.popleft()
        sampled = launched.wait()
        ended = [row.request for row in plan.rows if row.request.is_finished]
        sampled |= {name: SampledToken(-1) for name in sampled.keys() & self.wrong}
        self.scheduler.update(plan, sampled)
        assert [row.request for row in plan.rows if row.is_padding] == ended
        self.counts["padding"] += len(ended)

    def abort(self, leader: Request) -> None:
        for completion in reversed(leader.completions):
            if not completion.is_finished:
                self.counts["late aborts"] += completion.num_in_flight
                self.scheduler.finish(completion, "abort")
        self.scheduler.check_invariants()

    def interrupt(self) -> None:
        """Ctrl-C: what is in flight is lost, the tokens that are known are not."""
        self.in_flight.clear()
        completions = [each for leader in self.leaders.values() for each in leader.completions]
        self.scheduler.restart(each for each in completions if not each.is_finished)
        self.runner.reset()
        self.scheduler.check_invariants()
        assert self.scheduler.kv.pool.num_used == 0

    def check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert all(c.is_finished for leader in self.leaders.values() for c in leader.completions)
        assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0
        assert scheduler.prefix_cache.hashes == {}
        assert scheduler.reset_prefix_cache()
        self.counts["hits"] += int(scheduler.prefix_cache.counts["hits"])

    def outcomes(self) -> dict[str, tuple[list[int], str | None]]:
        """Tokens and finish reason of each completion."""
        return {
            each.request_id: (each.output_token_ids, each.finish_reason)
            for leader in self.leaders.values()
            for each in leader.completions
        }


def right_outcomes(script: Script) -> dict[str, tuple[list[int], str]]:
    """What each completion would get if it were alone and nothing happened to it."""
    outcomes = {}
    for arrivals in script.arrivals.values():
        for arrival in arrivals:
            for each in request_of(**arrival).completions:
                outcomes[each.request_id] = right_output(
                    each.prompt_token_ids,
                    each.sampling_params,
                    script.limits["max_model_len"],
                    each.index,
                )
    return outcomes


def assert_right(service: Service) -> None:
    """Whole outputs are right, those cut short are right as far as they go."""
    right = right_outcomes(service.script)
    outcomes = service.outcomes()
    assert outcomes.keys() == right.keys()
    for name, (token_ids, reason) in outcomes.items():
        if reason in ("abort", "error"):
            assert token_ids == right[name][0][: len(token_ids)]
            service.counts[reason] += 1
        else:
            assert (token_ids, reason) == right[name]


def test_settling_a_step_late_loses_no_token_and_no_block():
    at_once, late = Counter[str](), Counter[str]()
    for seed in range(NUM_SCRIPTS):
        script = Script.draw(seed)
        for num_ahead, counts in [(0, at_once), (1, late)]:
            service = Service(script, num_ahead)
            service.run()
            assert_right(service)
            counts += service.counts
    assert at_once["padding"] == at_once["late preemptions"] == at_once["late aborts"] == 0
    # The road led through what it was built for.
    kinds = ["late preemptions", "late aborts", "swaps", "hits", "copies", "forks", "padding"]
    assert min(late[kind] for kind in kinds) > 15, late
    assert min(late["abort"], late["error"]) > 5, late
