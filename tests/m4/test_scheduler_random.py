"""Thousands of random steps against the device of lists, with invariants on after each.

Prompts share beginnings, follow on earlier answers, fork, are cut into chunks, preempted, swapped,
aborted, interrupted, or fail. At every step every row sees its own context, everybody gets the
tokens that it would have got alone, and every block comes back.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from m4_prefix_chunked.speculation import GuessingRow, draft_token_ids
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import Request, RequestStatus
from paged_helpers import VOCAB_SIZE, Clairvoyant, completions, expected_tokens, is_done
from prefix_helpers import Life, request_of

NUM_STEPS = 5_000  # in each of four modes


class RandomLife(Life):
    """A scheduler to which random things happen."""

    def __init__(self, rng: random.Random, *, failure_rate: float = 0.03, **fields: str) -> None:
        self.rng, self.failure_rate = rng, failure_rate
        block_size = rng.choice([1, 2, 3, 4, 16])
        max_model_len = rng.randint(2, 40)
        num_blocks = -(-max_model_len // block_size) + rng.choice([0, 0, 1, 3, 20])
        is_chunked = rng.random() < 0.8
        budget = rng.choice([1, 3, 6, 13, 100]) if is_chunked else max_model_len + 8
        super().__init__(
            num_blocks,
            block_size,
            max_model_len,
            max_num_seqs=rng.randint(1, 8),
            max_num_batched_tokens=budget,
            enable_chunked_prefill=is_chunked,
            enable_prefix_caching=rng.random() < 0.8,
            long_prefill_token_threshold=rng.choice([0, 1, 3, 8]) if is_chunked else 0,
            speculation=rng.choice([None, "ngram", "ngram"]),
            prefill_policy=rng.choice(["mixed", "mixed", "prefill_first"]),
            swap_space_tokens=rng.choice([None, 0, block_size, 2 * max_model_len]),
            **fields,
        )
        if speculation := self.scheduler.speculation:
            speculation.proposer = Clairvoyant(rng, error_rate=rng.choice([0.1, 0.3, 0.6]))
            speculation.num_tokens = rng.choice([1, 3, 8])
        self.num_accepted = self.num_rejected = 0
        self.leaders: list[Request] = []
        self.unfinished: list[Request] = []
        self.pasts = [[rng.randrange(VOCAB_SIZE) for _ in range(max_model_len)] for _ in "ab"]
        """What prompts begin with: two system prompts, then also whole conversations."""
        self.num_steps = self.num_preemptions = self.num_swaps = self.num_partial = 0

    def arrive(self) -> None:
        rng, limit = self.rng, self.scheduler.max_model_len - 1
        past = rng.choice(self.pasts)
        num_tokens = rng.choice([rng.randint(1, limit), limit // 2 + 1, limit // 4 + 1])
        num_shared = rng.choice([num_tokens, rng.randint(0, num_tokens)])
        token_ids = past[:num_shared]
        token_ids += [rng.randrange(VOCAB_SIZE) for _ in range(num_tokens - len(token_ids))]
        leader = request_of(
            f"r{self.num_arrivals}",
            token_ids,
            rng.randint(1, 30),
            n=rng.choice([1, 1, rng.randint(1, min(4, self.scheduler.config.max_num_seqs))]),
            seed=rng.randrange(3),
            salt=rng.choice(["", "", "", "", "s"]),
            priority=rng.randint(0, 2),
        )
        self.add(leader)
        self.leaders.append(leader)
        self.unfinished += completions(leader)

    def abort_somebody(self) -> None:
        leader = self.rng.choice(self.leaders)
        last = completions(leader)[-1]
        if self.rng.random() < 0.3 and not last.is_finished:
            self.scheduler.finish(last, "abort")
            self.scheduler.check_invariants()
        else:
            self.abort(leader)
        self.note_ends()

    def interrupt(self) -> None:
        """Ctrl-C, before or after a step is planned. Nobody ends; all KV is computed again."""
        if self.rng.random() < 0.5:
            self.scheduler.schedule()
        self.device.reset()
        known = {request: list(request.token_ids) for request in self.unfinished}
        self.scheduler.restart(self.unfinished)
        self.scheduler.check_invariants()
        assert known == {request: request.token_ids for request in self.unfinished}
        assert {request.status for request in self.unfinished} <= {RequestStatus.WAITING}
        assert self.kv.pool.num_used == 0

    def step(self) -> None:
        scheduler = self.scheduler
        seniors = scheduler.by_seniority()
        plan = scheduler.schedule()
        self.check_plan(plan, seniors)
        self.carry_out(plan)
        scheduler.check_invariants()
        self.check_cached_content()
        self.num_steps += 1
        self.num_preemptions += len(plan.preempted)
        self.num_swaps += len(plan.swap_ins)
        self.note_ends()
        scheduler.drain_events()

    def carry_out(self, plan: StepPlan) -> None:
        """Compute a plan; now and then a request goes wrong, or the forward breaks off."""
        due = [request for row in plan.rows for request in row.sampling_requests]
        wrong: set[Request] = set()
        if self.goes_wrong():
            rows = [row.request for row in plan.rows]
            forks = self.scheduler.completions.forks
            wrong = {*due, *rows, *(fork for request in rows for fork in forks.get(request, ()))}
            self.device.reset()
            self.scheduler.fail(plan)
        else:
            sampled = self.device.run(plan)
            if due and self.goes_wrong():
                wrong = {self.rng.choice(due)}
                sampled |= {request.request_id: [SampledToken(-1)] for request in wrong}
            outputs = self.scheduler.update(plan, sampled)
            for row in plan.rows:
                if isinstance(row, GuessingRow):
                    self.num_accepted += row.num_new_tokens - 1
                    self.num_rejected += len(row.draft_token_ids) + 1 - row.num_new_tokens
            assert [output.request_id for output in outputs] == [r.request_id for r in due]
        assert {r for r in self.unfinished if r.finish_reason == "error"} == wrong

    def goes_wrong(self) -> bool:
        return self.failure_rate > 0 and self.rng.random() < self.failure_rate

    def note_ends(self) -> None:
        for request in self.unfinished:
            if request.is_finished:
                self.check_output(request)
                if len(self.pasts) < 6:
                    self.pasts.append(request.token_ids)
        self.unfinished = [request for request in self.unfinished if not request.is_finished]
        self.leaders = [each for each in self.leaders if not is_done(each)]

    def check_plan(self, plan: StepPlan, seniors: list[Request]) -> None:
        """What must hold of every plan."""
        scheduler, config = self.scheduler, self.scheduler.config
        rows = [row.request for row in plan.rows]
        newcomers = [*plan.admitted, *plan.resumed]
        newcomers = [request for request in newcomers if request in rows]  # not forks of this step
        assert rows, "unfinished requests, and nothing planned"
        assert len(rows) == len(set(rows))
        assert set(rows) <= set(scheduler.running)
        assert plan.num_tokens <= config.max_num_batched_tokens
        num_seats = len(scheduler.running) + scheduler.completions.num_of(scheduler.running)
        assert num_seats <= config.max_num_seqs
        for row in plan.rows:
            is_partial = row.end < row.request.num_tokens
            self.num_partial += is_partial
            assert row.num_new_tokens >= 1 + len(draft_token_ids(row))
            assert not draft_token_ids(row) or (row.samples and not plan.preempted)
            assert row.samples != is_partial
            assert config.enable_chunked_prefill or not is_partial
            if config.long_prefill_token_threshold:
                threshold = config.long_prefill_token_threshold
                assert row.num_new_tokens - len(draft_token_ids(row)) <= threshold
            num_tokens = row.request.num_tokens + len(draft_token_ids(row))
            num_blocks = self.kv.num_blocks_for(num_tokens)
            has_guessed = scheduler.speculation is not None  # and so has spare blocks
            assert len(row.blocks) == num_blocks or (len(row.blocks) > num_blocks and has_guessed)
        forked = {request for row in plan.rows for request in row.sampling_requests[1:]}
        left_out = set(scheduler.running) - set(rows) - forked
        is_full = plan.num_tokens == config.max_num_batched_tokens
        assert not left_out or is_full or config.prefill_policy == "prefill_first"
        assert forked <= set(plan.admitted) & set(scheduler.running)
        if plan.preempted:
            assert not newcomers
            assert seniors[0] not in [preemption.request for preemption in plan.preempted]
        if newcomers and scheduler.waiting:
            last = max(scheduler.waiting.key(request) for request in newcomers)
            assert last <= min(scheduler.waiting.key(request) for request in scheduler.waiting)

    def check_cached_content(self) -> None:
        """No block that can be found was spoilt or is only half full."""
        for block in self.kv.pool.hash_of:
            assert min(self.device.blocks[block]) >= 0
        known = {
            request.request_id for request in (*self.scheduler.waiting, *self.scheduler.running)
        }
        assert set(self.cache.hashes) <= known, "hashes of finished requests"

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
        scheduler = self.scheduler
        num_left = sum(len(completions(leader)) for leader in self.leaders)
        limit = self.num_steps + 80 * num_left  # as if one after the other, a token a step
        while scheduler.has_unfinished_requests():
            self.step()
            assert self.num_steps <= limit, "no progress"
        assert self.leaders == [], "requests dropped"
        assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0
        assert self.cache.hashes == {}
        assert scheduler.reset_prefix_cache()


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_twenty_thousand_random_steps_lose_no_block_and_no_token(preemption, policy):
    rng = random.Random(f"{preemption} {policy}")
    num_steps = num_preemptions = num_swaps = num_copies = num_partial = 0
    num_aborts = num_hits = num_evictions = num_accepted = num_rejected = 0
    while num_steps < NUM_STEPS:
        life = RandomLife(rng, preemption=preemption, policy=policy)
        while life.num_steps < 60:
            if len(life.leaders) < 10 and rng.random() < 0.4:
                life.arrive()
            if life.leaders and rng.random() < 0.05:
                life.abort_somebody()
                num_aborts += 1
            if rng.random() < 0.01:
                life.interrupt()
            if life.scheduler.has_unfinished_requests():
                life.step()
        life.drain()
        num_steps += life.num_steps
        num_preemptions += life.num_preemptions
        num_swaps += life.num_swaps
        num_partial += life.num_partial
        num_copies += life.kv.num_copies
        num_hits += life.counts["hits"]
        num_evictions += life.counts["evictions"]
        num_accepted += life.num_accepted
        num_rejected += life.num_rejected
    # The road led through what it was built for.
    assert min(num_preemptions, num_copies, num_hits, num_evictions, num_partial) > 50
    assert num_aborts > 30
    assert min(num_accepted, num_rejected) > 100
    assert (num_swaps > 20) == (preemption == "swap")


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
