"""Checks exercises/m2_fair_queue.py."""

import random

from helpers.schedulers import Life, of_length
from m2_batching import EngineConfig
from m2_batching.scheduler import Scheduler
from milestone_llm.core.request_queue import RequestQueue

EXERCISE = ("m2_fair_queue.py", "FairQueue")
WRONG, TOLD = RequestQueue, "50 of alice's are served before bob's"


def queue_up(queue, tenant, count, num_prompt_tokens=10, first_arrival=0):
    requests = [
        of_length(f"{tenant}/{number}", num_prompt_tokens, 10, arrival=number)
        for number in range(first_arrival, first_arrival + count)
    ]
    for request in requests:
        queue.add(request)
    return requests


def tenant_of(request):
    return request.request_id.partition("/")[0]


def tenants_of(queue, count):
    return [tenant_of(queue.pop()) for _ in range(count)]


def turns_before_bob(kind):
    """Bob's single request comes after fifty of alice: how many are served before it."""
    queue = kind()
    queue_up(queue, "alice", 50)
    queue_up(queue, "bob", 1, first_arrival=50)
    return tenants_of(queue, 51).index("bob")


def test_a_small_tenant_does_not_wait_for_a_large_one(exercise, figure):
    num_before, before = turns_before_bob(exercise), turns_before_bob(RequestQueue)
    figure("turns of others before a small tenant's", str(num_before), str(before))
    assert num_before <= 2, (
        f"alice queued 50 requests, then bob one: {num_before} of alice's are served before bob's. "
        "Neither had paid anything, so bob's turn comes after at most one of alice's."
    )


def test_turns_are_counted_in_tokens(exercise):
    queue = exercise()
    queue_up(queue, "alice", 40, num_prompt_tokens=70)  # 80 tokens each
    queue_up(queue, "bob", 40, num_prompt_tokens=10, first_arrival=40)  # 20 tokens each
    paid = {"alice": 0, "bob": 0}
    for _ in range(40):
        request = queue.pop()
        paid[tenant_of(request)] += request.num_prompt_tokens + 10
        assert abs(paid["alice"] - paid["bob"]) <= 80, (
            f"requests of alice cost 80 tokens, of bob 20; after some turns they have paid {paid}. "
            "More than one request apart: who has paid less should have been next."
        )


def test_absence_gains_no_credit(exercise):
    queue = exercise()
    queue_up(queue, "alice", 60)
    tenants_of(queue, 40)
    queue_up(queue, "bob", 20, first_arrival=60)
    num_turns = tenants_of(queue, 20).count("bob")
    assert 9 <= num_turns <= 11, (
        f"bob comes when alice has had 40 turns alone, and has {num_turns} of the next 20. "
        "A tenant that was away starts level with the others: 10 turns are fair."
    )


def test_absence_forgives_no_debt(exercise):
    queue = exercise()
    queue_up(queue, "bob", 60)  # 20 tokens each
    served, arrival = ["bob"], 60
    for _ in range(40):
        is_waiting = any(tenant_of(request) == "mallory" for request in queue)
        if served[-1] == "bob" and not is_waiting:
            queue_up(queue, "mallory", 1, num_prompt_tokens=990, first_arrival=arrival)
            arrival += 1
        served.append(tenant_of(queue.pop()))
    num_turns = served.count("mallory")
    assert num_turns <= 2, (
        f"requests of bob cost 20 tokens. mallory sends one of 1,000 at a time, each a turn after "
        f"the last was served, and has {num_turns} of 40 turns. What a tenant owes it still owes "
        "when it comes back: lift it, but never lower it."
    )


def test_what_is_aborted_costs_nothing(exercise):
    queue = exercise()
    queue_up(queue, "bob", 1)
    for request in queue_up(queue, "alice", 20, first_arrival=1):
        queue.remove(request)  # as the scheduler does when a waiting request is aborted
    queue_up(queue, "alice", 20, first_arrival=21)
    queue_up(queue, "bob", 20, first_arrival=41)
    num_turns = tenants_of(queue, 20).count("alice")
    assert 9 <= num_turns <= 11, (
        f"alice aborted 20 requests before they ran, and then has {num_turns} of 20 turns. "
        "She pays when a request is popped, so these cost nothing: 10 turns are fair."
    )


def test_of_equals_the_oldest_request_is_next(exercise):
    queue = exercise()
    for arrival, tenant in enumerate(("zoe", "ann", "ann", "zoe")):
        queue_up(queue, tenant, 1, first_arrival=arrival)
    arrivals = [queue.pop().arrival for _ in range(4)]
    assert arrivals == [0, 1, 2, 3], (
        f"requests 0 and 3 of zoe, 1 and 2 of ann cost the same, and are popped as {arrivals}. "
        "Where two tenants have paid equally much, the one whose oldest request came first is next."
    )


def test_a_newcomer_is_lifted_to_before_the_last_turn(exercise):
    queue = exercise()
    queue_up(queue, "alice", 2, num_prompt_tokens=990)
    queue.pop()
    queue_up(queue, "bob", 3, first_arrival=2)
    served = tenants_of(queue, 3)
    assert served == ["bob"] * 3, (
        "alice had paid nothing when her first request of 1,000 tokens was served. So bob, who "
        f"comes then, has paid nothing either, and his three of 20 tokens are next, not {served}."
    )


def test_one_tenant_is_served_in_order_of_arrival(exercise):
    queue = exercise()
    queue_up(queue, "alice", 10)
    arrivals = [queue.pop().arrival for _ in range(10)]
    assert arrivals == list(range(10)), f"a tenant's requests are popped in the order {arrivals}"


def test_peek_length_iteration_and_removal_agree_with_pop(exercise):
    rng = random.Random(0)
    queue, waiting = exercise(), {}
    for number in range(300):
        if rng.random() < 0.6:
            request = of_length(
                f"{rng.choice('abc')}/{number}", rng.randint(1, 50), 3, arrival=number
            )
            queue.add(request)
            waiting[request.request_id] = request
        elif waiting and rng.random() < 0.3:
            queue.remove(waiting.pop(rng.choice(sorted(waiting))))
        elif waiting:
            order = list(queue)
            assert queue.peek() is order[0], "peek() is not the first of list(queue)"
            assert queue.pop() is order[0], "pop() is not what peek() showed"
            del waiting[order[0].request_id]
        assert len(queue) == len(waiting), "len(queue) is not the number of waiting requests"
        names = {request.request_id for request in queue}
        assert names == set(waiting), f"list(queue) differs by {names ^ set(waiting)}"
    order = list(queue)
    assert [queue.pop() for _ in order] == order, "requests are not popped in the order of list()"


def test_a_scheduler_serves_everybody_with_it(exercise):
    scheduler = Scheduler(EngineConfig(max_num_seqs=4, max_num_batched_tokens=64), 256)
    scheduler.waiting = exercise()
    rng = random.Random(1)
    requests = [
        of_length(f"{rng.choice('abcd')}/{number}", rng.randint(1, 40), rng.randint(1, 9))
        for number in range(200)
    ]
    arrivals: dict[int, list] = {}
    for request in requests:
        arrivals.setdefault(rng.randrange(100), []).append(request)
    for _ in Life(scheduler=scheduler).steps(arrivals):
        pass
    assert all(request.is_finished for request in requests)
