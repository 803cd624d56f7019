"""Completions that share a prompt, requests that leave early and steps that raise."""

from __future__ import annotations

import pytest

from m3_paged.scheduler import Scheduler
from milestone_llm.engine.request import Request, RequestStatus
from paged_helpers import (
    PagedDevice,
    add_all,
    expected_tokens,
    make_requests,
    make_scheduler,
    run_to_end,
    step,
    step_until_preemption,
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
    scheduler.abort(leader.completions[aborted])
    run_to_end(scheduler)
    for index, request in enumerate(leader.completions):
        if index == aborted:
            assert (request.finish_reason, request.num_output_tokens) == ("abort", 0)
        else:
            assert request.output_token_ids == expected_tokens(request, 4)
    assert scheduler.kv.num_copies == 1


def abort_group(scheduler: Scheduler, leader: Request) -> None:
    """As the engine does it: forks before what they fork from."""
    for completion in reversed(leader.completions):
        if not completion.is_finished:
            scheduler.abort(completion)
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
    assert [r.finish_reason for r in leader.completions] == ["abort"] * 3
    assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0


# --- a step that raised -------------------------------------------------------------------------


def test_fail_frees_the_host_blocks_of_this_steps_victims_and_recomputes_them():
    """The copy to the host may not have been made; nothing of it may be trusted."""
    scheduler = make_scheduler(3, preemption="swap")
    a, b = make_requests("a", 4, 5), make_requests("b", 3, 5)
    add_all(scheduler, a, b)
    device = PagedDevice(scheduler)
    for _ in range(2):
        step(scheduler, device)
    plan = scheduler.schedule()
    assert plan.swap_outs
    scheduler.fail(plan)
    scheduler.check_invariants()
    assert (a.finish_reason, b.status) == ("error", RequestStatus.WAITING)
    assert scheduler.kv.pool.num_used == scheduler.preempter.host.pool.num_used == 0
    assert run_to_end(scheduler, device)[0] == "b[0:5]@1,2 | ^b"
    assert b.output_token_ids == expected_tokens(b, 5)


def test_fail_leaves_those_alone_who_were_swapped_out_before():
    scheduler = make_scheduler(3, preemption="swap")
    a, b = make_requests("a", 4, 5), make_requests("b", 3, 5)
    add_all(scheduler, a, b)
    device = PagedDevice(scheduler)
    step_until_preemption(scheduler, device)
    scheduler.fail(scheduler.schedule())
    scheduler.check_invariants()
    assert (a.finish_reason, b.status) == ("error", RequestStatus.SWAPPED)
    assert scheduler.preempter.host.pool.num_used == 1
    run_to_end(scheduler, device)
    assert b.output_token_ids == expected_tokens(b, 5)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_fail_ends_all_completions_forked_or_not(num_steps):
    scheduler = make_scheduler(8)
    leader = make_requests("a", 6, 6, n=3)
    add_all(scheduler, leader)
    for _ in range(num_steps):
        step(scheduler, PagedDevice(scheduler))
    (output,) = scheduler.fail(scheduler.schedule())
    scheduler.check_invariants()
    assert [completion.finish_reason for completion in output.outputs] == ["error"] * 3
    assert not scheduler.has_unfinished_requests()
    assert scheduler.kv.pool.num_used == 0
