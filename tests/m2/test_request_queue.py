"""The queue of waiting requests: order, removal anywhere, ids used again."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_helpers import make_request
from milestone_llm.core.request import Request
from milestone_llm.core.request_queue import RequestQueue


def filled(policy: str, *priorities: int) -> tuple[RequestQueue, list[Request]]:
    queue = RequestQueue(policy)
    requests = [
        make_request(f"q{number}", arrival=number, priority=priority)
        for number, priority in enumerate(priorities)
    ]
    for request in requests:
        queue.add(request)
    return queue, requests


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_fcfs_goes_by_arrival_and_ignores_priority():
    queue, _ = filled("fcfs", 5, 0, 3, -1)
    assert drain(queue) == ["q0", "q1", "q2", "q3"]


def test_priority_goes_by_priority_then_arrival_and_lower_is_sooner():
    queue, _ = filled("priority", 5, 0, 5, -1, 0)
    assert drain(queue) == ["q3", "q1", "q4", "q0", "q2"]


def test_peek_leaves_the_request_in_the_queue():
    queue, requests = filled("fcfs", 0, 0)
    assert queue.peek() is queue.peek() is requests[0]
    assert len(queue) == 2


def test_iteration_is_in_the_order_of_serving_and_changes_nothing():
    queue, _ = filled("priority", 2, 1, 0)
    assert [request.request_id for request in queue] == ["q2", "q1", "q0"]
    assert drain(queue) == ["q2", "q1", "q0"]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_request_can_be_removed_wherever_it_is(victim):
    queue, requests = filled("fcfs", 0, 0, 0)
    queue.remove(requests[victim])
    assert len(queue) == 2
    assert drain(queue) == [f"q{n}" for n in range(3) if n != victim]
    assert not queue


def test_a_request_that_comes_back_is_at_the_head_again():
    """A preempted request keeps its arrival, and so its place before all who still wait."""
    queue, requests = filled("fcfs", 0, 0, 0)
    first = queue.pop()
    queue.add(first)
    assert queue.peek() is first is requests[0]


def test_an_id_used_again_after_removal_takes_the_new_place():
    queue, requests = filled("fcfs", 0, 0)
    queue.remove(requests[0])
    again = make_request("q0", arrival=2)
    queue.add(again)
    assert queue.pop() is requests[1]
    assert queue.pop() is again
    assert len(queue) == 0


def test_an_empty_queue_has_nothing_to_give():
    queue, requests = filled("fcfs", 0)
    queue.remove(requests[0])
    for take in (queue.peek, queue.pop):
        with pytest.raises(IndexError):
            take()


class SortedList:
    """The same by brute force: sort at every look."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.requests: list[Request] = []

    def first(self) -> Request:
        is_fcfs = self.policy == "fcfs"
        return min(self.requests, key=lambda r: (0 if is_fcfs else r.priority, r.arrival))


@settings(max_examples=60)
@given(st.sampled_from(["fcfs", "priority"]), st.data())
def test_any_sequence_of_operations_acts_like_a_sorted_list(policy: str, data: Any):
    queue, model, arrivals = RequestQueue(policy), SortedList(policy), itertools.count()
    taken: list[Request] = []
    for _ in range(data.draw(st.integers(1, 40))):
        choices = ["add"] + ["pop", "remove"] * bool(model.requests) + ["return"] * bool(taken)
        action = data.draw(st.sampled_from(choices))
        if action == "add":
            request = make_request(
                data.draw(st.sampled_from([f"new{n}" for n in range(50)])),
                arrival=next(arrivals),
                priority=data.draw(st.integers(-2, 2)),
            )
            if request.request_id in {other.request_id for other in model.requests + taken}:
                continue  # the engine refuses ids of unfinished requests
            queue.add(request)
            model.requests.append(request)
        elif action == "pop":
            request = queue.pop()
            assert request is model.first()
            model.requests.remove(request)
            taken.append(request)
        elif action == "remove":
            request = data.draw(st.sampled_from(model.requests))
            queue.remove(request)
            model.requests.remove(request)
        else:
            request = taken.pop()
            queue.add(request)
            model.requests.append(request)
        assert len(queue) == len(model.requests)
        assert bool(queue) == bool(model.requests)
        if model.requests:
            assert queue.peek() is model.first()
    assert {request.request_id for request in queue} == {r.request_id for r in model.requests}


def test_a_thousand_requests_are_served_by_looking_at_few_of_them(monkeypatch):
    """O(log n) each: a queue that sorted or searched at every step would look at a million."""
    looks, key = [], RequestQueue.key
    monkeypatch.setattr(
        RequestQueue, "key", lambda self, request: looks.append(request) or key(self, request)
    )
    queue, requests = filled("priority", *(n % 7 for n in range(1000)))
    for request in requests[::3]:
        queue.remove(request)
    served = []
    while queue:
        request = queue.pop()
        served.append((request.priority, request.arrival))
    assert served == sorted(served)
    assert len(served) == 1000 - len(requests[::3])
    assert len(looks) < 10 * len(requests)
