"""Static batching, without a model: who shares a batch, who drags on as padding, who waits."""

from __future__ import annotations

import random
from typing import Any

from helpers.schedulers import Life, assert_tokens, of_length, spans
from m1_single import EngineConfig
from m1_single.scheduler import Scheduler


def make_life(**fields: Any) -> Life:
    return Life(scheduler=Scheduler(EngineConfig(**{"max_num_seqs": 3, **fields}), 64))


def test_finished_rows_stay_as_padding_and_newcomers_wait_for_the_last_row():
    arrivals = {
        0: [of_length("a", 4, 2), of_length("b", 2, 4), of_length("c", 3, 1)],
        1: [of_length("d", 5, 1)],
    }
    assert [spans(plan) for plan in make_life().steps(arrivals)] == [
        "a[0:4] b[0:2] c[0:3]",
        "a[4:5] b[2:3] (c)",
        "(a) b[3:4] (c)",
        "(a) b[4:5] (c)",
        "d[0:5]",
    ]


def test_the_token_budget_counts_padded_rows_and_nobody_overtakes():
    """3 + 6 tokens would fit into 10, but padded to 2 * 6 they do not; c must not pass b."""
    arrivals = {0: [of_length("a", 3, 1), of_length("b", 6, 1), of_length("c", 3, 1)]}
    life = make_life(max_num_batched_tokens=10)
    assert [spans(plan) for plan in life.steps(arrivals)] == ["a[0:3]", "b[0:6]", "c[0:3]"]


def test_an_aborted_row_is_padding_and_an_aborted_waiting_request_never_runs():
    life = make_life(max_num_seqs=2)
    requests = {name: of_length(name, 2, 3) for name in "abcd"}
    lines = []
    for step, plan in enumerate(life.steps({0: [*requests.values()]})):
        lines.append(spans(plan))
        if step == 0:
            life.abort(requests["a"])
            life.abort(requests["c"])
            assert (len(life.scheduler.waiting), len(life.scheduler.running)) == (1, 1)
    assert lines == [
        "a[0:2] b[0:2]", "(a) b[2:3]", "(a) b[3:4]", "d[0:2]", "d[2:3]", "d[3:4]"
    ]  # fmt: skip


def test_kv_usage_is_the_padded_rectangle():
    life = make_life()
    life.add(of_length("a", 5, 3), of_length("b", 2, 2))
    life.plan()
    kv = life.scheduler.kv_usage()
    assert (kv.unit, kv.total, kv.used, kv.free) == ("token", 10, 10, 0)
    assert (kv.reserved_tokens, kv.stored_tokens, kv.watermark) == (10, 7, 10)
    life.plan()
    kv = life.scheduler.kv_usage()
    assert (kv.reserved_tokens, kv.stored_tokens) == (12, 6), "b is done, its row is still there"


def test_random_work_keeps_the_rules():
    """Some thousand steps: within both limits, a batch is never joined, all is served in order."""
    rng = random.Random(0)
    for _ in range(60):
        budget, max_num_seqs = rng.randint(8, 40), rng.randint(1, 5)
        life = make_life(max_num_batched_tokens=budget, max_num_seqs=max_num_seqs)
        arrivals: dict[int, list] = {}
        for number in range(20):
            request = of_length(str(number), rng.randint(1, 8), rng.randint(1, 9))
            arrivals.setdefault(rng.randint(0, 40), []).append(request)
        admitted = []
        rows: set[str] = set()
        for plan in life.steps(arrivals):
            assert plan.num_tokens + plan.num_padding_tokens <= budget
            assert len(plan.rows) <= max_num_seqs
            names = {row.request.request_id for row in plan.rows}
            assert names == ({request.request_id for request in plan.admitted} or rows)
            assert any(not row.is_padding for row in plan.rows)
            rows = names
            admitted += [request.arrival for request in plan.admitted]
        requests = [request for group in arrivals.values() for request in group]
        assert all(request.is_finished for request in requests)
        assert_tokens(requests)
        assert admitted == list(range(20)), "first come, first served, nobody dropped"
        assert life.scheduler.kv_usage().used == 0
