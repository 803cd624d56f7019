"""Iteration-level scheduling, without a model: every rule, golden plans of scripted arrivals."""

from __future__ import annotations

from typing import Any

import pytest

from engine_helpers import (
    FakeRunner,
    describe,
    make_request,
    plan_lines,
    scripted_steps,
)
from m2_batching.config import EngineConfig
from m2_batching.scheduler import Scheduler
from milestone_llm.core.request import Request


def make_scheduler(max_model_len: int = 64, **fields: Any) -> Scheduler:
    return Scheduler(EngineConfig(**{"max_num_seqs": 3, **fields}), max_model_len)


# --- golden plans -------------------------------------------------------------------------------


def test_newcomers_join_at_the_next_step_and_prefill_beside_decodes():
    arrivals = {
        0: [make_request("a", 4, 4), make_request("b", 2, 2)],
        2: [make_request("c", 3, 2)],
    }
    assert plan_lines(make_scheduler(), arrivals) == [
        "a[0:4] b[0:2]",
        "a[4:5] b[2:3]",
        "a[5:6] c[0:3]",
        "a[6:7] c[3:4]",
    ]


def test_the_batch_falls_as_requests_finish_and_nothing_is_padded():
    arrivals = {0: [make_request(name, 2, n) for name, n in (("a", 2), ("b", 4), ("c", 3))]}
    plans = list(scripted_steps(make_scheduler(), arrivals))
    assert [len(plan.rows) for plan in plans] == [3, 3, 2, 1]
    assert all(plan.num_padding_tokens == 0 for plan in plans)


def test_a_finished_request_leaves_at_once_and_its_region_is_used_in_the_next_step():
    arrivals = {0: [make_request(name, 2, n) for name, n in (("a", 3), ("b", 2), ("c", 2))]}
    scheduler = make_scheduler(max_num_seqs=2)
    plans = list(scripted_steps(scheduler, arrivals))
    regions = [{row.request.request_id: row.blocks for row in plan.rows} for plan in plans]
    assert regions == [
        {"a": [0], "b": [1]},
        {"a": [0], "b": [1]},
        {"a": [0], "c": [1]},
        {"c": [1]},
    ]


def test_the_budget_holds_a_prompt_back_and_nobody_overtakes_it():
    """In step 1, a's decode leaves 7 of 8 tokens: too few for b, enough for c, which waits too."""
    arrivals = {
        0: [make_request("a", 3, 3), make_request("b", 8, 1), make_request("c", 2, 1)],
    }
    assert plan_lines(make_scheduler(max_num_batched_tokens=8), arrivals) == [
        "a[0:3]",
        "a[3:4]",
        "a[4:5]",
        "b[0:8]",
        "c[0:2]",
    ]


def test_running_requests_come_before_waiting_ones():
    """Three decodes first; of a budget of 6, 3 tokens are left, just what d needs."""
    arrivals = {
        0: [make_request(name, 2, 3) for name in "abc"],
        1: [make_request("d", 3, 1), make_request("e", 1, 1)],
    }
    assert plan_lines(make_scheduler(max_num_seqs=5, max_num_batched_tokens=6), arrivals) == [
        "a[0:2] b[0:2] c[0:2]",
        "a[2:3] b[2:3] c[2:3] d[0:3]",
        "a[3:4] b[3:4] c[3:4] e[0:1]",
    ]


def test_a_one_token_prompt_is_prefill_and_then_decode():
    plans = list(scripted_steps(make_scheduler(), {0: [make_request("a", 1, 2)]}))
    assert [plan.rows[0].phase for plan in plans] == ["prefill", "decode"]


def test_priority_decides_who_is_next_but_takes_no_place_from_the_running():
    arrivals = {
        0: [make_request("low", 2, 3, priority=9), make_request("mid", 2, 1, priority=5)],
        1: [make_request("urgent", 2, 1, priority=-1), make_request("same", 2, 1, priority=5)],
    }
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    assert plan_lines(scheduler, arrivals) == [
        "mid[0:2]",
        "urgent[0:2]",
        "same[0:2]",
        "low[0:2]",
        "low[2:3]",
        "low[3:4]",
    ]


def test_fcfs_ignores_priority():
    arrivals = {0: [make_request("a", 2, 1, priority=9), make_request("b", 2, 1, priority=0)]}
    assert plan_lines(make_scheduler(max_num_seqs=1), arrivals) == ["a[0:2]", "b[0:2]"]


def test_an_urgent_prompt_that_does_not_fit_is_not_overtaken_either():
    arrivals = {
        0: [make_request("a", 4, 2)],
        1: [make_request("urgent", 8, 1, priority=-1), make_request("b", 1, 1)],
    }
    scheduler = make_scheduler(max_num_batched_tokens=8, policy="priority")
    assert plan_lines(scheduler, arrivals) == ["a[0:4]", "a[4:5]", "urgent[0:8]", "b[0:1]"]


def test_generation_ends_at_max_model_len():
    request = make_request("a", 4, 99)
    assert len(plan_lines(make_scheduler(max_model_len=7), {0: [request]})) == 3
    assert (request.finish_reason, request.num_tokens) == ("length", 7)


# --- abort, failure, configuration --------------------------------------------------------------


def test_an_aborted_requests_region_and_row_are_free_in_the_next_step():
    scheduler = make_scheduler(max_num_seqs=2)
    requests = {name: make_request(name, 2, 3) for name in "abcd"}
    lines = []
    for step, plan in enumerate(scripted_steps(scheduler, {0: [*requests.values()]})):
        lines.append(describe(plan))
        if step == 0:
            scheduler.finish(requests["a"], "abort")  # running
            scheduler.finish(requests["c"], "abort")  # waiting
    assert lines[:2] == ["a[0:2] b[0:2]", "b[2:3] d[0:2]"]
    assert {request.finish_reason for request in requests.values()} == {"abort", "length"}


def test_a_failed_step_ends_its_requests_and_the_queue_goes_on():
    scheduler, runner = make_scheduler(max_num_seqs=2), FakeRunner()
    requests = [make_request(name, 2, 2, arrival=n) for n, name in enumerate("abc")]
    for request in requests:
        scheduler.add(request)
    plan = scheduler.schedule()
    scheduler.update(plan, runner.run(plan))
    scheduler.fail(scheduler.schedule())
    assert [request.finish_reason for request in requests] == ["error", "error", None]
    scheduler.check_invariants()
    assert scheduler.kv_usage().free == 2
    assert describe(scheduler.schedule()) == "c[0:2]"


def test_a_request_that_has_outgrown_a_step_is_computed_again_in_a_step_of_its_own():
    scheduler, request = make_scheduler(max_num_batched_tokens=4), make_request("a", 4, 5)
    runner = FakeRunner()
    scheduler.add(request)
    for _ in range(2):
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
    scheduler.restart([request])
    assert describe(scheduler.schedule()) == "a[0:6]"


def test_kv_usage_shows_what_a_region_reserves_and_what_it_stores():
    scheduler, runner = make_scheduler(max_model_len=64), FakeRunner()
    for n, name in enumerate("ab"):
        scheduler.add(make_request(name, 5, 9, arrival=n))
    for _ in range(2):
        plan = scheduler.schedule()
        scheduler.update(plan, runner.run(plan))
    kv = scheduler.kv_usage()
    assert (kv.unit, kv.total, kv.used, kv.free, kv.watermark) == ("region", 3, 2, 1, 2)
    assert (kv.reserved_tokens, kv.stored_tokens) == (2 * 64, 2 * 6)


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ({"max_num_seqs": 1}, "max_num_seqs=1"),
        ({"max_num_batched_tokens": 8}, "tokens needed: 8, left in this step: 7"),
    ],
)
def test_the_reason_to_wait_is_given_in_numbers(setting, reason):
    scheduler = make_scheduler(**setting)
    scheduler.add(make_request("a", 3))
    scheduler.schedule()
    budget = scheduler.config.max_num_batched_tokens - 1
    assert reason in str(scheduler.reason_to_wait(make_request("b", 8), budget))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"policy": "lifo"}, "policy.*'lifo'"),
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "=8 is less than max_num_seqs=9"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**fields)


def test_nobody_starves_under_fcfs_however_many_come_later():
    """A prompt as large as a whole step gets its turn although small ones keep coming."""
    scheduler = make_scheduler(max_num_batched_tokens=16)
    big = make_request("big", 16, 1)
    arrivals: dict[int, list[Request]] = {0: [make_request("s", 1, 5), big]}
    for step in range(1, 40):
        arrivals[step] = [make_request(f"s{step}", 1, 5)]
    for step, plan in enumerate(scripted_steps(scheduler, arrivals)):
        if big in plan.admitted:
            assert step == 5, "as soon as the one before it is done"
            return
    pytest.fail("it never ran")
