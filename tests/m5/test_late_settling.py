"""M4's schedule one step ahead of the tokens: plan n + 1 is made before the tokens of n are known.

The same arrivals and aborts are served twice, once with every step settled at once and once a step
late. Requests stop at random, share prefixes, fork, are preempted, swapped and aborted while a
token of theirs is on its way. The runner reads all KV back at every step, and whatever the order of
things, everybody gets the same tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from m4_prefix_chunked.speculation import GuessingRow
from m5_kernels.extras.guesses.proposer import DeviceProposer
from m5_kernels.runner import FusedRunner
from milestone_llm.core.engine_core import EngineCore, StepListener
from milestone_llm.core.outputs import EngineCoreOutput, SampledToken
from milestone_llm.core.plan import LaunchedStep, StepPlan
from milestone_llm.core.request import Request, RequestStatus
from milestone_llm.models.tiny_models import VOCAB_SIZE
from read_back import ReadBackRunner, right_output
from scheduler_helpers import completions, make_scheduler, request_of

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
                "speculation": (None, "ngram", "ngram")[seed % 3],
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


class PlanListener(StepListener):
    """Lets a service check each plan."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def planned(self, plan: StepPlan) -> None:
        if not plan.is_empty:
            self.service.check_plan(plan)


class Service(EngineCore):
    """The core, with every plan checked and some tokens spoilt, serving a script."""

    def __init__(self, script: Script, is_pipelined: bool) -> None:
        scheduler = make_scheduler(**script.limits)
        if scheduler.speculation is not None:
            scheduler.speculation.proposer = DeviceProposer()
        runner = ReadBackRunner(scheduler.config.block_size)
        can_run_ahead = FusedRunner.can_run_ahead if is_pipelined else None
        super().__init__(scheduler, runner, can_run_ahead, PlanListener(self))
        self.script = script
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
                self.add_request(*completions(leader))
            unfinished = [*self.scheduler.running, *self.scheduler.waiting]
            if step in self.script.aborts and unfinished:
                request = unfinished[int(self.script.aborts[step] * len(unfinished))]
                self.abort(self.leaders[request.request_id.split("/")[0]])
            if step in self.script.interruptions:
                self.interrupt()
            self.wrong.add(self.script.errors.get(step, ""))
            self.step()
            self.scheduler.check_invariants()
            self.scheduler.drain_events()
            step += 1
            assert step < 3_000, "no progress"
        assert not self.in_flight
        self.check_nothing_is_left()

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

    def settle(self) -> list[EngineCoreOutput]:
        step = self.in_flight[0]
        sampled, plan = step.launched.wait(), step.plan
        sampled |= {name: [SampledToken(-1)] for name in sampled.keys() & self.wrong}
        step.launched = LaunchedStep(lambda: sampled)
        ended = [row.request for row in plan.rows if row.request.is_finished]
        outputs, num_rejected = super().settle(), 0
        for row in plan.rows:
            if isinstance(row, GuessingRow) and row.num_accepted is not None:
                self.counts["accepted"] += row.num_accepted
                num_rejected += len(row.draft_token_ids) - row.num_accepted
        self.counts["rejected"] += num_rejected
        in_vain = [row for row in plan.rows if row.is_padding]
        assert [row.request for row in in_vain] == ended
        assert plan.num_padding_tokens == num_rejected + sum(row.num_new_tokens for row in in_vain)
        self.counts["padding"] += len(ended)
        return outputs

    def abort(self, leader: Request) -> None:
        for completion in reversed(completions(leader)):
            if not completion.is_finished:
                self.counts["late aborts"] += completion.num_in_flight
                self.finish_request(completion, "abort")
        self.scheduler.check_invariants()

    def interrupt(self) -> None:
        """Ctrl-C: what is in flight is lost, the tokens that are known are not."""
        requests = [each for leader in self.leaders.values() for each in completions(leader)]
        self.restart(each for each in requests if not each.is_finished)
        self.scheduler.check_invariants()
        assert self.scheduler.kv.pool.num_used == 0

    def check_nothing_is_left(self) -> None:
        scheduler = self.scheduler
        assert all(c.is_finished for leader in self.leaders.values() for c in completions(leader))
        assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0
        assert scheduler.prefix_cache.hashes == {}
        assert scheduler.reset_prefix_cache()
        self.counts["hits"] += int(scheduler.prefix_cache.counts["hits"])

    def outcomes(self) -> dict[str, tuple[list[int], str | None]]:
        """Tokens and finish reason of each completion."""
        return {
            each.request_id: (each.output_token_ids, each.finish_reason)
            for leader in self.leaders.values()
            for each in completions(leader)
        }


def right_outcomes(script: Script) -> dict[str, tuple[list[int], str]]:
    """What each completion would get if it were alone and nothing happened to it."""
    outcomes = {}
    for arrivals in script.arrivals.values():
        for arrival in arrivals:
            for each in completions(request_of(**arrival)):
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
        for is_pipelined, counts in [(False, at_once), (True, late)]:
            service = Service(script, is_pipelined)
            service.run()
            assert_right(service)
            counts += service.counts
    assert at_once["padding"] == at_once["late preemptions"] == at_once["late aborts"] == 0
    # The road led through what it was built for.
    kinds = ["late preemptions", "late aborts", "swaps", "hits", "copies", "forks", "padding"]
    assert min(late[kind] for kind in kinds) > 15, late
    assert min(late["abort"], late["error"]) > 5, late
    assert min(late["accepted"], late["rejected"]) > 50, late


def test_a_block_whose_last_token_was_in_flight_when_it_filled_up_is_found_later():
    """It has no name then: it gets one when its owner is preempted, or ends."""
    core = EngineCore(make_scheduler(3), ReadBackRunner(4), lambda plan: True)
    cache = core.scheduler.prefix_cache

    def run(*requests: Request) -> None:
        for request in requests:
            core.add_request(request)
        while core.scheduler.has_unfinished_requests():
            core.step()

    run(request_of("a", [4, 5, 6], 3), b := request_of("b", [7, 8, 9], 6, arrival=1))
    assert (b.num_preemptions, cache.counts["saved_tokens"]) == (1, 4)
    run(c := request_of("c", [3, 4, 5], 2))
    run(request_of("d", [*c.token_ids[:4], 9]))
    assert cache.counts["saved_tokens"] == 8
