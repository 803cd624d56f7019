"""Checks exercises/m2_fair_queue.py."""

import random

import pytest

from engine_helpers import FakeRunner, make_request, scripted_steps
from m2_batching import EngineConfig
from m2_batching.scheduler import Scheduler
from milestone_llm.engine.request_queue import RequestQueue

EXERCISE = ("m2_fair_queue.py", "FairQueue")


def queue_up(queue, tenant, count, num_prompt_tokens=10, first_arrival=0):
    for number in range(first_arrival, first_arrival + count):
        queue.add(make_request(f"{tenant}/{number}", num_prompt_tokens, 10, arrival=number))


def tenants_of(queue, count):
    return [queue.pop().request_id.partition("/")[0] for _ in range(count)]


def check_a_small_tenant_does_not_wait_for_a_large_one(kind):
    queue = kind()
    queue_up(queue, "alice", 50)
    queue_up(queue, "bob", 1, first_arrival=50)
    assert "bob" in tenants_of(queue, 3)


def check_absence_gains_no_credit(kind):
    queue = kind()
    queue_up(queue, "alice", 60)
    tenants_of(queue, 40)
    queue_up(queue, "bob", 20, first_arrival=60)
    turns = tenants_of(queue, 20)
    assert 9 <= turns.count("bob") <= 11, f"bob has {turns.count('bob')} of 20 turns"


def test_one_tenant_is_served_in_order_of_arrival(exercise):
    queue = exercise()
    queue_up(queue, "alice", 10)
    assert [queue.pop().arrival for _ in range(10)] == list(range(10))


def test_a_small_tenant_does_not_wait_for_a_large_one(exercise):
    check_a_small_tenant_does_not_wait_for_a_large_one(exercise)


def test_turns_are_counted_in_tokens(exercise):
    queue = exercise()
    queue_up(queue, "alice", 40, num_prompt_tokens=70)  # 80 tokens each
    queue_up(queue, "bob", 40, num_prompt_tokens=10, first_arrival=40)  # 20 tokens each
    paid = {"alice": 0, "bob": 0}
    for _ in range(40):
        request = queue.pop()
        paid[request.request_id.partition("/")[0]] += request.num_prompt_tokens + 10
        assert abs(paid["alice"] - paid["bob"]) <= 80, "at most the largest request apart"


def test_absence_gains_no_credit(exercise):
    check_absence_gains_no_credit(exercise)


def test_peek_length_iteration_and_removal_agree_with_pop(exercise):
    rng = random.Random(0)
    queue, waiting = exercise(), {}
    for number in range(300):
        if rng.random() < 0.6:
            request = make_request(
                f"{rng.choice('abc')}/{number}", rng.randint(1, 50), arrival=number
            )
            queue.add(request)
            waiting[request.request_id] = request
        elif waiting and rng.random() < 0.3:
            queue.remove(waiting.pop(rng.choice(sorted(waiting))))
        elif waiting:
            order = list(queue)
            assert queue.peek() is order[0]
            assert queue.pop() is order[0]
            del waiting[order[0].request_id]
        assert len(queue) == len(waiting)
        assert {request.request_id for request in queue} == set(waiting)
    order = list(queue)
    assert [queue.pop() for _ in order] == order


def test_a_scheduler_serves_everybody_with_it(exercise):
    scheduler = Scheduler(EngineConfig(max_num_seqs=4, max_num_batched_tokens=64), 256)
    scheduler.waiting = exercise()
    rng = random.Random(1)
    requests = [
        make_request(f"{rng.choice('abcd')}/{number}", rng.randint(1, 40), rng.randint(1, 9))
        for number in range(200)
    ]
    arrivals: dict[int, list] = {}
    for request in requests:
        arrivals.setdefault(rng.randrange(100), []).append(request)
    for _ in scripted_steps(scheduler, arrivals, FakeRunner()):
        pass
    assert all(request.is_finished for request in requests)


def test_the_queue_that_the_exercise_starts_from_is_caught():
    with pytest.raises(AssertionError):
        check_a_small_tenant_does_not_wait_for_a_large_one(RequestQueue)


def test_a_counter_that_is_never_lifted_is_caught():
    class LeastServedFirst(RequestQueue):
        def __init__(self, policy="fcfs"):
            super().__init__(policy)
            self.paid = {}

        def peek(self):
            def key(request):
                return (self.paid.get(request.request_id.partition("/")[0], 0), request.arrival)

            return min(self._requests.values(), key=key)

        def pop(self):
            request = self.peek()
            self.remove(request)
            tenant = request.request_id.partition("/")[0]
            self.paid[tenant] = self.paid.get(tenant, 0) + request.num_prompt_tokens + 10
            return request

    check_a_small_tenant_does_not_wait_for_a_large_one(LeastServedFirst)
    with pytest.raises(AssertionError, match="bob has 20 of 20"):
        check_absence_gains_no_credit(LeastServedFirst)
