"""Rules that every plan keeps, from any scheduler. The core checks each plan before its forward.

A plan that breaks a rule would give wrong tokens without an error, or lose a request, which then
waits for ever. Only the rows are checked: no step takes longer because more requests wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain

from .errors import PlanError
from .kv import KVCacheManager, tables_of
from .plan import ScheduledRequest, StepPlan
from .request import Request
from .scheduler import BaseScheduler


def check_plan(
    plan: StepPlan,
    scheduler: BaseScheduler,
    num_queued: int,
    num_events: int,
    unfinished: Mapping[str, Request],
    is_in_flight: bool = False,
) -> None:
    """Check a plan that has just been made: nothing of it has been launched.

    Args:
        num_queued: how many requests waited or ran before the plan was made.
        num_events: how many events of KV memory there were then.
        unfinished: all requests that have been added and have not ended, by id.
        is_in_flight: whether a step is under way. Then this plan may be empty.

    Raises:
        PlanError: the first rule that is broken.
    """
    if not isinstance(plan, StepPlan):
        raise PlanError(f"schedule() returned {plan!r}, not a StepPlan", place_of(scheduler))
    members: list[Request] = []  # requests that have a row, or begin with another's
    for row in plan.rows:
        if rule := broken_rule(row):
            raise PlanError(rule, place_of(scheduler))
        members.append(row.request)
        if len(row.sampling_requests) > 1:
            members += row.sampling_requests[1:]
    if len(set(members)) < len(members):
        name = next(each.request_id for each, count in Counter(members).items() if count > 1)
        rule = f"{name} is in this step twice: a request has one row, or begins with another's"
        raise PlanError(rule, place_of(scheduler))
    if rule := broken_rule_of_blocks(plan, scheduler.kv, num_events):
        raise PlanError(rule, place_of(scheduler))
    check_nobody_is_lost(scheduler, num_queued, unfinished)
    if plan.is_empty and not is_in_flight:
        raise PlanError("there are requests, but the plan is empty", place_of(scheduler))


def broken_rule(row: ScheduledRequest) -> str | None:
    """Return what is wrong with a row; None if nothing is."""
    request = row.request
    name, num_computed = request.request_id, request.num_computed_tokens
    is_finished = request.finish_reason is not None
    if row.is_padding or is_finished:
        if row.is_padding == is_finished:
            return None
        state = "has finished" if is_finished else "has not finished"
        return f"{name} {state}, and its row has is_padding={row.is_padding}"
    if row.start != num_computed:
        return f"{name}'s row starts at {row.start}: its num_computed_tokens is {num_computed}"
    # A row that may bring several tokens computes draft tokens after the known ones.
    num_known = row.num_new_tokens - row.num_sampled_tokens + 1
    num_uncomputed = request.num_uncomputed_tokens
    if not 1 <= num_known <= num_uncomputed:
        limits = f"at least 1, at most num_uncomputed_tokens={num_uncomputed}"
        return f"{name}'s row has {num_known} tokens: {limits}"
    sampling = row.sampling_requests
    if num_known < num_uncomputed:
        return f"{name}'s row samples before its last known token" if sampling else None
    if not sampling or sampling[0] is not request:
        return f"{name}'s row reaches its last known token, and {name} samples nothing there"
    return None


def broken_rule_of_blocks(plan: StepPlan, kv: KVCacheManager, num_events: int) -> str | None:
    """Return what is wrong with the blocks that a plan reads, writes or moves; None if nothing is.

    The KV manager knows: a row has its request's blocks, and what is moved is in the events of the
    step. Anything else would write over the KV of another request.
    """
    blocks_of = kv.blocks_of
    for row in plan.rows:
        if row.is_padding or row.blocks is (table := blocks_of(row.request)):
            continue
        if row.blocks != table:
            name = row.request.request_id
            return f"{name}'s row has the blocks {row.blocks}, and {name} owns {table}"
        if (tables := tables_of(row.blocks)) != (owned := tables_of(table)):
            name = row.request.request_id
            return f"{name}'s row has, by group, the blocks {tables}, and {name} owns {owned}"
    if not (plan.copies or plan.swap_outs or plan.swap_ins):
        return None
    events = kv.events[num_events:]
    moved = {kind: [each.blocks for each in events if each.type == kind] for kind in MOVES}
    copies = [(source, target) for source, target in moved["copy_on_write"]]
    for name, planned, made in (
        ("copies", plan.copies, copies),
        ("swap_outs", [block for block, _ in plan.swap_outs], [*chain(*moved["swap_out"])]),
        ("swap_ins", [block for _, block in plan.swap_ins], [*chain(*moved["swap_in"])]),
    ):
        if planned != made:
            return f"the plan's {name} are of blocks {planned}, and KV memory has moved {made}"
    return None


MOVES = ("copy_on_write", "swap_out", "swap_in")
"""Events of blocks that a plan moves."""


def check_nobody_is_lost(
    scheduler: BaseScheduler, num_expected: int, unfinished: Mapping[str, Request]
) -> None:
    """Check that `num_expected` requests wait or run, and that none is unfinished if it is 0.

    Raises:
        PlanError: the number is wrong; the message names the requests that are in no queue.
    """
    num_queued = scheduler.num_queued
    if num_queued == num_expected and (num_queued or not unfinished):
        return
    lost = [
        name
        for name, each in unfinished.items()
        if each not in scheduler.waiting
        and each not in scheduler.running
        and each not in scheduler.completions
    ]
    rule = f"{num_expected} requests should wait or run, and {num_queued} do"
    raise PlanError(f"{rule}; lost: {', '.join(lost) or 'nobody'}", place_of(scheduler))


def place_of(scheduler: BaseScheduler) -> str:
    """Return where a scheduler plans, as file and line: the `schedule` of its class, or else the
    first method that the class itself defines."""
    kind = type(scheduler)
    methods = [each for each in vars(kind).values() if hasattr(each, "__code__")]
    code = vars(kind).get("schedule", [*methods, kind.schedule][0]).__code__
    return f"{code.co_filename}, line {code.co_firstlineno}"
