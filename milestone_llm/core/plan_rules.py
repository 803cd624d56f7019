"""Rules that every plan keeps, whoever has made it. The core checks each one before its forward.

A plan that breaks one would give wrong tokens without a word, or lose somebody who then waits for
ever. What is looked at are the rows: no step takes longer because more requests wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .errors import PlanError
from .plan import ScheduledRequest, StepPlan
from .request import Request
from .scheduler import BaseScheduler


def check_plan(
    plan: StepPlan,
    scheduler: BaseScheduler,
    num_queued: int,
    unfinished: Mapping[str, Request],
    is_in_flight: bool = False,
) -> None:
    """Check a plan that has just been made: nothing of it has been launched.

    Args:
        num_queued: how many waited or ran before.
        unfinished: all that have been added and have not ended.
        is_in_flight: whether a step is under way. Then this one may be empty.

    Raises:
        PlanError: the first rule that is broken.
    """
    if not isinstance(plan, StepPlan):
        raise PlanError(f"schedule() returned {plan!r}, not a StepPlan", place_of(scheduler))
    members: list[Request] = []  # of the step: who has a row, or begins with another's
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
    check_nobody_is_lost(scheduler, num_queued, unfinished)
    if plan.is_empty and not is_in_flight:
        raise PlanError("there are requests, but the plan is empty", place_of(scheduler))


def broken_rule(row: ScheduledRequest) -> str | None:
    """What is wrong with a row; None if nothing is."""
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
    # Tokens besides the known ones are in a row that may bring several.
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


def check_nobody_is_lost(
    scheduler: BaseScheduler, num_expected: int, unfinished: Mapping[str, Request]
) -> None:
    """Check that so many requests wait or run; if nobody, that nobody is unfinished.

    Raises:
        PlanError: with the names of those that are in no queue.
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
    """Where it plans: its class's `schedule`, or the first method that the class has of its own."""
    kind = type(scheduler)
    methods = [each for each in vars(kind).values() if hasattr(each, "__code__")]
    code = vars(kind).get("schedule", [*methods, kind.schedule][0]).__code__
    return f"{code.co_filename}, line {code.co_firstlineno}"
