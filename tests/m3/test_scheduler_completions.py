"""Completions that share a prompt, requests that leave early and steps that raise."""

from __future__ import annotations

import pytest

from m3_paged.scheduler import Scheduler
from milestone_llm.core.outputs import SampledToken
from milestone_llm.core.request import Request, RequestStatus
from paged_helpers import (
    PagedDevice,
    add_all,
    completions,
    expected_tokens,
    make_requests,
    make_scheduler,
    run_to_end,
    step,
    waiting_ids,
)

both_modes = pytest.mark.parametrize("preemption", ["recompute", "swap"])


def test_completions_that_are_too_many_for_a_step_are_refused():
    scheduler = make_scheduler(max_num_seqs=3)
    scheduler.validate(make_requests("a", 3, 3, n=3))
    with pytest.raises(ValueError, match=r"n=4 .* max_num_seqs=3"):
        scheduler.validate(make_requests("a", 3, 3, n=4))


@pytest.mark.parametrize("aborted", [1, 2])
def test_a_completion_aborted_before_it_forked_leaves_the_others_alone(aborted):
    scheduler = make_scheduler()
    leader = make_requests("a", 6, 4, n=3)
    add_all(scheduler, leader)
    scheduler.finish(completions(leader)[aborted], "abort")
    run_to_end(scheduler)
    for index, request in enumerate(completions(leader)):
        if index == aborted:
            assert (request.finish_reason, request.num_output_tokens) == ("abort", 0)
        else:
            assert request.output_token_ids == expected_tokens(request, 4)
    assert scheduler.kv.num_copies == 1


def abort_group(scheduler: Scheduler, leader: Request) -> None:
    """As the engine does it: forks before what they fork from."""
    for completion in reversed(completions(leader)):
        if not completion.is_finished:
            scheduler.finish(completion, "abort")
    scheduler.check_invariants()


@both_modes
@pytest.mark.parametrize("num_steps", range(6))
def test_abort_gives_everything_back_in_whatever_state_the_completions_are(num_steps, preemption):
    """Before the fork, sharing blocks, after copies, and with some preempted."""
    scheduler = make_scheduler(4, preemption=preemption)
    leader, other = make_requests("a", 6, 6, n=3), make_requests("b", 3, 4)
    add_all(scheduler, leader, other)
    device = PagedDevice(scheduler)
    for _ in range(num_steps):
        step(scheduler, device)
    abort_group(scheduler, leader)
    assert set(scheduler.kv.block_tables) | set(waiting_ids(scheduler)) == {"b"}
    assert set(scheduler.preempter.host.block_tables) <= {"b"}
    run_to_end(scheduler, device)
    assert other.output_token_ids == expected_tokens(other, 4)
    assert [r.finish_reason for r in completions(leader)] == ["abort"] * 3
    assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0


def test_a_completion_without_a_token_to_choose_ends_alone():
    """The first, in the very step in which the others start from its KV."""
    scheduler = make_scheduler(8)
    leader, other = make_requests("a", 6, 4, n=3), make_requests("b", 3, 4)
    add_all(scheduler, leader, other)
    device = PagedDevice(scheduler)
    plan = scheduler.schedule()
    outputs = scheduler.update(plan, device.run(plan) | {"a": [SampledToken(-1)]})
    scheduler.check_invariants()
    assert [(each.request_id, len(each.new_token_ids), each.finish_reason) for each in outputs] == [
        ("a", 0, "error"),
        ("a/1", 1, None),
        ("a/2", 1, None),
        ("b", 1, None),
    ]
    run_to_end(scheduler, device)
    for request in (*completions(leader)[1:], other):
        assert request.output_token_ids == expected_tokens(request, 4)
    assert scheduler.kv.pool.num_used == 0


# --- a step that raised, or was interrupted -----------------------------------------------------


@both_modes
@pytest.mark.parametrize("is_new_victim", [True, False])
def test_fail_gives_all_memory_back_and_who_was_not_in_the_step_is_computed_again(
    is_new_victim, preemption
):
    """The copy to the host may not have been made; nothing of it may be trusted."""
    scheduler = make_scheduler(3, preemption=preemption)
    a, b = make_requests("a", 4, 5), make_requests("b", 3, 5)
    add_all(scheduler, a, b)
    device = PagedDevice(scheduler)
    for _ in range(2 if is_new_victim else 3):
        step(scheduler, device)
    plan = scheduler.schedule()
    assert bool(plan.preempted) is is_new_victim
    tokens = list(b.output_token_ids)
    scheduler.fail(plan)
    scheduler.check_invariants()
    device.reset()
    assert (a.finish_reason, b.finish_reason) == ("error", None)
    assert (b.status, b.num_computed_tokens) == (RequestStatus.WAITING, 0)
    assert b.output_token_ids == tokens == expected_tokens(b, 2)
    assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0
    assert run_to_end(scheduler, device)[0] == "b[0:5]@0,1 | ^b"
    assert b.output_token_ids == expected_tokens(b, 5)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_fail_ends_all_completions_forked_or_not(num_steps):
    scheduler = make_scheduler(8)
    leader = make_requests("a", 6, 6, n=3)
    add_all(scheduler, leader)
    for _ in range(num_steps):
        step(scheduler, PagedDevice(scheduler))
    scheduler.fail(scheduler.schedule())
    scheduler.check_invariants()
    assert [completion.finish_reason for completion in completions(leader)] == ["error"] * 3
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv.pool.num_used == 0


@both_modes
@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("num_steps", range(6))
def test_after_a_restart_everybody_keeps_its_tokens_and_is_computed_again(
    num_steps, is_planned, preemption
):
    """Between two steps, or with one planned and not computed: its prompt may just have forked."""
    scheduler = make_scheduler(4, preemption=preemption)
    leader, other = make_requests("a", 6, 6, n=3), make_requests("b", 3, 6)
    add_all(scheduler, leader, other)
    device = PagedDevice(scheduler)
    for _ in range(num_steps):
        step(scheduler, device)
    if is_planned:
        scheduler.schedule()
    requests = [*completions(leader), other]
    tokens = [list(request.token_ids) for request in requests]
    scheduler.restart(requests)
    scheduler.check_invariants()
    device.reset()
    assert [request.token_ids for request in requests] == tokens
    assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0
    # Completions that have no token yet start from one prompt again.
    forks = [] if num_steps == 0 else ["a/1", "a/2"]
    assert waiting_ids(scheduler) == ["a", *forks, "b"]
    run_to_end(scheduler, device)
    for request in requests:
        assert request.finish_reason == "length"
        assert request.output_token_ids == expected_tokens(request, 6)
