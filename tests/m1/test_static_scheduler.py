"""Static batching, without a model: who shares a batch, who drags on as padding, who waits."""

from __future__ import annotations

import random
from typing import Any

from helpers.engines import (
    FakeRunner,
    describe,
    make_request,
    plan_lines,
    scripted_steps,
)
from m1_single import EngineConfig
from m1_single.scheduler import Scheduler
from milestone_llm.core.request import RequestStatus


def make_scheduler(max_model_len: int = 64, **fields: Any) -> Scheduler:
    return Scheduler(EngineConfig(**{"max_num_seqs": 3, **fields}), max_model_len)


def test_finished_rows_stay_as_padding_and_newcomers_wait_for_the_last_row():
    arrivals = {
        0: [make_request("a", 4, 2), make_request("b", 2, 4), make_request("c", 3, 1)],
        1: [make_request("d", 5, 1)],
    }
    assert plan_lines(make_scheduler(), arrivals) == [
        "a[0:4] b[0:2] c[0:3]",
        "a[4:5] b[2:3] (c)",
        "(a) b[3:4] (c)",
        "(a) b[4:5] (c)",
        "d[0:5]",
    ]


def test_the_token_budget_counts_padded_rows_and_nobody_overtakes():
    """3 + 6 tokens would fit into 10, but padded to 2 * 6 they do not; c must not pass b."""
    arrivals = {0: [make_request("a", 3, 1), make_request("b", 6, 1), make_request("c", 3, 1)]}
    assert plan_lines(make_scheduler(max_num_batched_tokens=10), arrivals) == [
        "a[0:3]",
        "b[0:6]",
        "c[0:3]",
    ]


def test_an_aborted_row_is_padding_and_an_aborted_waiting_request_never_runs():
    scheduler, runner = make_scheduler(max_num_seqs=2), FakeRunner()
    requests = {name: make_request(name, 2, 3) for name in "abcd"}
    lines = []
    for step, plan in enumerate(scripted_steps(scheduler, {0: [*requests.values()]}, runner)):
        lines.append(describe(plan))
        if step == 0:
            scheduler.finish(requests["a"], "abort")
            scheduler.finish(requests["c"], "abort")
            assert (len(scheduler.waiting), len(scheduler.running)) == (1, 1)
    assert lines == [
        "a[0:2] b[0:2]", "(a) b[2:3]", "(a) b[3:4]", "d[0:2]", "d[2:3]", "d[3:4]"
    ]  # fmt: skip


def test_kv_usage_is_the_padded_rectangle():
    scheduler, runner = make_scheduler(), FakeRunner()
    for request in (make_request("a", 5, 3), make_request("b", 2, 2)):
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.update(plan, runner.run(plan))
    kv = scheduler.kv_usage()
    assert (kv.unit, kv.total, kv.used, kv.free) == ("token", 10, 10, 0)
    assert (kv.reserved_tokens, kv.stored_tokens, kv.watermark) == (10, 7, 10)
    plan = scheduler.schedule()
    scheduler.update(plan, runner.run(plan))
    kv = scheduler.kv_usage()
    assert (kv.reserved_tokens, kv.stored_tokens) == (12, 6), "b is done, its row is still there"


def test_random_work_keeps_the_rules():
    """Some thousand steps: within both limits, a batch is never joined, all is served in order."""
    rng = random.Random(0)
    for _ in range(60):
        budget, max_num_seqs = rng.randint(8, 40), rng.randint(1, 5)
        scheduler = make_scheduler(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
        arrivals: dict[int, list] = {}
        for number in range(20):
            request = make_request(str(number), rng.randint(1, 8), rng.randint(1, 9))
            arrivals.setdefault(rng.randint(0, 40), []).append(request)
        admitted = []
        rows: set[str] = set()
        for plan in scripted_steps(scheduler, arrivals):
            assert plan.num_tokens + plan.num_padding_tokens <= budget
            assert len(plan.rows) <= max_num_seqs
            names = {row.request.request_id for row in plan.rows}
            assert names == ({request.request_id for request in plan.admitted} or rows)
            assert any(not row.is_padding for row in plan.rows)
            rows = names
            admitted += [request.arrival for request in plan.admitted]
        requests = [request for group in arrivals.values() for request in group]
        assert all(request.status is RequestStatus.FINISHED for request in requests)
        assert admitted == list(range(20)), "first come, first served, nobody dropped"
        assert scheduler.kv_usage().used == 0
