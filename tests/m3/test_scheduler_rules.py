"""Each rule that M3's scheduler keeps, one by one, with a device of lists for the model."""

from __future__ import annotations

import pytest

from milestone_llm.core.plan import StepPlan
from milestone_llm.core.request import RequestStatus
from paged_helpers import (
    PagedDevice,
    add_all,
    expected_tokens,
    make_requests,
    make_scheduler,
    plan_line,
    run_to_end,
    step,
    step_until_preemption,
    waiting_ids,
)

both_modes = pytest.mark.parametrize("preemption", ["recompute", "swap"])


def preempted_ids(plan: StepPlan) -> list[str]:
    return [preemption.request.request_id for preemption in plan.preempted]


# --- a request's life ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ([], RequestStatus.WAITING),
        ([], RequestStatus.SWAPPED),
        ([RequestStatus.RUNNING], RequestStatus.RUNNING),
        ([RequestStatus.RUNNING, RequestStatus.SWAPPED], RequestStatus.SWAPPED),
        ([RequestStatus.FINISHED], RequestStatus.FINISHED),
        ([RequestStatus.FINISHED], RequestStatus.RUNNING),
    ],
)
def test_a_request_does_not_become_what_cannot_follow(before, after):
    request = make_requests("a", 3, 9)
    for status in before:
        request.become(status)
    with pytest.raises(RuntimeError, match=f"request a is .* cannot become {after.name}"):
        request.become(after)
    assert request.status is ([RequestStatus.WAITING, *before])[-1]


# --- who has to go ------------------------------------------------------------------------------


@both_modes
def test_the_victim_is_the_most_recently_admitted(preemption):
    scheduler = make_scheduler(4, preemption=preemption)
    add_all(scheduler, *(make_requests(name, 3, 9) for name in "abc"))
    assert preempted_ids(step_until_preemption(scheduler, PagedDevice(scheduler))) == ["c"]


def test_under_priority_the_victim_has_the_largest_priority_and_arrival():
    """b and c came later than a, and are sooner; of b and c, c arrived later."""
    scheduler = make_scheduler(4, policy="priority")
    device = PagedDevice(scheduler)
    requests = [make_requests(name, 3, 9, priority=p) for name, p in [("a", 2), ("b", 1), ("c", 1)]]
    for arrival, request in enumerate(requests):
        request.arrival = arrival
        scheduler.add(request)
        step(scheduler, device)
    assert [request.request_id for request in scheduler.running] == ["a", "b", "c"]
    assert [request.request_id for request in scheduler.by_seniority()] == ["b", "c", "a"]
    victims = []
    while scheduler.has_unfinished_requests():
        victims += preempted_ids(step(scheduler, device))
    assert victims[:2] == ["a", "c"]
    assert "b" not in victims


def test_a_junior_that_needs_a_block_goes_itself():
    scheduler = make_scheduler(2)
    a, b = make_requests("a", 2, 6), make_requests("b", 4, 4)
    add_all(scheduler, a, b)
    device = PagedDevice(scheduler)
    step(scheduler, device)
    plan = scheduler.schedule()
    assert plan_line(plan) == "a[2:3]@0 | -b"
    assert plan.preempted[0].reason == "no free block for b"


def test_no_more_are_preempted_than_necessary():
    """One victim's block is enough for a; d, the last, has it; b and c stay."""
    scheduler = make_scheduler(4, max_num_seqs=4)
    add_all(
        scheduler,
        make_requests("a", 4, 3),
        *(make_requests(name, 2, 3) for name in "bcd"),
    )
    device = PagedDevice(scheduler)
    step(scheduler, device)
    plan = step(scheduler, device)
    assert plan_line(plan) == "a[4:5]@0,3 b[2:3]@1 c[2:3]@2 | -d"
    assert plan.preempted[0].reason == "no free block for a"


def test_victims_of_shared_blocks_are_taken_until_a_block_is_really_free():
    """Preempting a completion that shares all its blocks frees none: the next one goes as well."""
    scheduler = make_scheduler(2)
    add_all(scheduler, make_requests("a", 6, 2, n=3))
    device = PagedDevice(scheduler)
    step(scheduler, device)
    assert preempted_ids(step(scheduler, device)) == ["a/2", "a/1"]


# --- what becomes of the victim -----------------------------------------------------------------


@both_modes
def test_the_preempted_goes_to_the_head_of_the_queue(preemption):
    scheduler = make_scheduler(4, max_num_seqs=3, preemption=preemption)
    add_all(scheduler, *(make_requests(name, 3, 9) for name in "abcde"))
    step_until_preemption(scheduler, PagedDevice(scheduler))
    assert waiting_ids(scheduler) == ["c", "d", "e"]


def test_two_victims_of_one_step_wait_in_the_order_of_their_arrival():
    scheduler = make_scheduler(8, block_size=1, max_num_seqs=4)
    add_all(scheduler, *(make_requests(name, 2, 6) for name in "abcd"))
    device = PagedDevice(scheduler)
    step(scheduler, device)
    assert preempted_ids(step(scheduler, device)) == ["d", "c"]
    assert waiting_ids(scheduler) == ["c", "d"]


@both_modes
def test_the_preempted_keeps_the_tokens_it_had(preemption):
    scheduler = make_scheduler(4, preemption=preemption)
    requests = [make_requests(name, 3, 9) for name in "abc"]
    add_all(scheduler, *requests)
    plan = step_until_preemption(scheduler, PagedDevice(scheduler))
    (victim,) = [preemption.request for preemption in plan.preempted]
    assert victim.num_output_tokens == 2
    assert victim.output_token_ids == expected_tokens(victim, 2)
    is_swapped = preemption == "swap"
    assert victim.status is (RequestStatus.SWAPPED if is_swapped else RequestStatus.WAITING)
    assert victim.num_computed_tokens == (4 if is_swapped else 0)
    assert victim.request_id not in scheduler.kv.block_tables


@both_modes
def test_nobody_is_admitted_in_a_step_that_preempted(preemption):
    """b leaves three blocks of which a takes one; d is next and would fit, and yet it waits."""
    scheduler = make_scheduler(4, preemption=preemption, policy="priority")
    a, b = make_requests("a", 4, 2, priority=0), make_requests("b", 9, 5, priority=2)
    add_all(scheduler, a, b)
    device = PagedDevice(scheduler)
    step(scheduler, device)
    d = make_requests("d", 1, 1, priority=1, arrival=2)
    scheduler.add(d)
    plan = step(scheduler, device)
    assert preempted_ids(plan) == ["b"]
    assert plan.admitted == plan.resumed == []
    assert waiting_ids(scheduler) == ["d", "b"]
    assert scheduler.reason_to_wait(d, budget=100) is None
    assert d in step(scheduler, device).admitted


def test_nobody_overtakes_a_preempted_request_that_does_not_fit_yet():
    scheduler = make_scheduler(4)
    a, b, d = make_requests("a", 4, 6), make_requests("b", 9, 5), make_requests("d", 1, 1)
    add_all(scheduler, a, b, d)
    device = PagedDevice(scheduler)
    step_until_preemption(scheduler, device)
    for _ in range(3):
        plan = step(scheduler, device)
        assert plan.admitted == plan.resumed == []
        assert scheduler.kv.can_allocate(d.num_tokens)
    assert "blocks needed 3, free 2" in scheduler.reason_to_wait(b, budget=100)


def test_a_recomputation_waits_for_a_step_that_has_room_for_it():
    """d has 5 tokens to compute again; a and b take 2 of the 6 that a step may have."""
    scheduler = make_scheduler(16, block_size=1, max_model_len=6, max_num_batched_tokens=6)
    sizes = [("a", 1, 5), ("b", 1, 5), ("c", 2, 4), ("d", 2, 4)]
    requests = [make_requests(*size) for size in sizes]
    add_all(scheduler, *requests)
    device = PagedDevice(scheduler)
    assert preempted_ids(step_until_preemption(scheduler, device)) == ["d"]
    assert [row.request.request_id for row in step(scheduler, device).rows] == ["a", "b"]
    assert scheduler.kv.can_allocate(5)
    assert scheduler.reason_to_wait(requests[3], 6 - 2) == "tokens needed: 5, left in this step: 4"
    (row,) = step(scheduler, device).rows
    assert (row.request, row.start, row.num_new_tokens) == (requests[3], 0, 5)


# --- enough for everybody -----------------------------------------------------------------------


@both_modes
@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
def test_a_lone_request_grows_to_max_model_len_in_a_pool_of_just_that(block_size, preemption):
    num_blocks = -(-24 // block_size)
    scheduler = make_scheduler(
        num_blocks, block_size, max_model_len=24, preemption=preemption, max_num_seqs=1
    )
    request = make_requests("a", 5, 1000)
    add_all(scheduler, request)
    run_to_end(scheduler)
    assert (request.num_tokens, request.finish_reason) == (24, "length")
    assert scheduler.preempter.num_preemptions == 0
    assert scheduler.watermark == -(-23 // block_size)  # the last token's KV is not needed


@both_modes
def test_a_pool_that_is_exactly_full_preempts_nobody(preemption):
    """Three requests of three blocks end in nine of nine: full, and not one too many."""
    scheduler = make_scheduler(9, preemption=preemption)
    requests = [make_requests(name, 4, 9) for name in "abc"]  # 12 tokens of KV at the end
    add_all(scheduler, *requests)
    run_to_end(scheduler)
    assert (scheduler.preempter.num_preemptions, scheduler.watermark) == (0, 9)
    tighter = make_scheduler(8, preemption=preemption)
    add_all(tighter, *(make_requests(name, 4, 9) for name in "abc"))
    run_to_end(tighter)
    # Of eight blocks no step had more than six: a third request's go where one grows.
    assert (tighter.preempter.num_preemptions, tighter.watermark) == (1, 6)


@both_modes
def test_a_preemption_storm_starves_and_drops_nobody(preemption):
    """A pool for two of twenty. The oldest is never preempted, so that there is always progress."""
    scheduler = make_scheduler(6, preemption=preemption, max_model_len=12, max_num_seqs=20)
    requests = [make_requests(f"r{i:02}", 1 + i % 4, 8) for i in range(20)]
    add_all(scheduler, *requests)
    device, num_steps = PagedDevice(scheduler), 0
    while scheduler.has_unfinished_requests():
        oldest = min(request.arrival for request in requests if not request.is_finished)
        plan = step(scheduler, device)
        num_steps += 1
        assert requests[oldest] not in [preemption.request for preemption in plan.preempted]
        assert requests[oldest] in [row.request for row in plan.rows]
    assert scheduler.preempter.num_preemptions >= 18
    assert num_steps <= 20 * 8  # never slower than one after the other
    for request in requests:
        assert request.finish_reason == "length"
        assert request.output_token_ids == expected_tokens(request, 8)


def test_only_what_was_computed_is_swapped_and_the_host_copy_is_freed_on_return():
    """Back on the device the table has a second block, for the next token: nothing moves there."""
    scheduler = make_scheduler(3, preemption="swap")
    add_all(scheduler, make_requests("a", 4, 5), make_requests("b", 3, 5))
    device = PagedDevice(scheduler)
    plan = step_until_preemption(scheduler, device)
    assert len(plan.swap_outs) == scheduler.preempter.host.pool.num_used == 1
    while not (plan := step(scheduler, device)).resumed:
        pass
    (row,) = plan.rows
    assert (row.start, row.num_new_tokens, len(row.blocks)) == (4, 1, 2)
    assert [target for _, target in plan.swap_ins] == row.blocks[:1]
    assert scheduler.preempter.host.block_tables == {}


def test_without_swap_space_swapping_is_recomputing():
    lines = []
    for fields in ({}, {"preemption": "swap", "swap_space_tokens": 3}):  # less than a block
        scheduler = make_scheduler(4, **fields)
        add_all(scheduler, *(make_requests(name, 3, 9) for name in "abc"))
        lines.append(run_to_end(scheduler))
        assert scheduler.preempter.num_preemptions > 0
    assert lines[0] == lines[1]
